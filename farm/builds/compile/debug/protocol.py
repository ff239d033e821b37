"""Messages between `farm debug` and its compiler process, one JSON line each way, and the caller's end. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.builds.compile.processes import CompilerEnding, CompilerProcess
from farm.builds.compile.watched import take_node
from farm.builds.program.layers import Layer
from farm.suites.suite import Job

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Compiler


BUNDLE = "bundle"
ETRECORD = "etrecord.bin"
"""File beside the bundle with ExecuTorch's record of the graph for its own tools."""


class CompileRequest(msgspec.Struct, frozen=True, tag="compile"):
    """Request to compile a job with intermediate outputs, and to compute the references."""

    job: Job
    versions: dict[str, str]
    sample: int
    """Number of the sample among the inputs of the case."""
    folder: str
    """Empty folder; the bundle will be in BUNDLE in it, and the ETRecord in ETRECORD."""


class Written(msgspec.Struct, frozen=True):
    """Files of one execution."""

    etdump: str
    outputs: str
    """File of the intermediate outputs, to which the ETDump refers."""


class CompareRequest(msgspec.Struct, frozen=True, tag="compare"):
    """Request to compare the outputs of the compiled program."""

    simulator: Written
    device: Written | None = None
    """None for an execution in the simulator alone."""


class DebugReply(msgspec.Struct, frozen=True):
    """Reply to a request."""

    ok: bool
    reason: str = ""
    """Single line; empty when ok."""
    infra: bool = False
    """True for a fault of the machine (no space, no permission), not of the job."""
    refused: bool = False
    """True for a job that may be correct, without layers to compare."""
    seconds: dict[str, float] = {}
    """Wall time by step."""
    packed_layers: bytes = b""
    """Layers as msgpack, as JSON has no infinities."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the result."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Compared layers in the order of execution."""
        return msgspec.msgpack.decode(self.packed_layers, type=tuple[Layer, ...]) if self.packed_layers else ()


# Caller's end of the compiler process, which is farm.builds.compile.debug.debugger.


class DebugProcess(CompilerProcess):
    """Compiler process of `farm debug`, for requests from one thread at a time."""

    def __init__(self, supervisor: Supervisor, compiler: Compiler, log: Path, folder: Path) -> None:
        """Start the process in the new `folder`.

        The caller removes the folder with the compiler's leftovers.
        """
        folder.mkdir()
        # The process has another current folder than this process, so that the path must be absolute.
        words = [str(folder), str(log.absolute())]
        super().__init__("farm.builds.compile.debug.debugger", words, supervisor, "debugger", compiler, log)

    def receive(self, timeout_s: float) -> DebugReply:
        """Return the reply to the request; a crash and an exceeded time limit become a reply as well."""
        line = self.receive_line(timeout_s)
        if not isinstance(line, CompilerEnding):
            return msgspec.json.decode(line, type=DebugReply)
        node = take_node(self.log)
        if reason := line._replace(began=True).compiler_reason(timeout_s):
            return DebugReply(ok=False, reason=f"{reason}; it was at {node}" if node else reason)
        return DebugReply(
            ok=False, reason=f"the compiler process ended with signal {-line.code}: see {self.log}", infra=True
        )
