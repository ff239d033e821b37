"""What `farm debug` and its compiler process send each other, one JSON line each way. Torch-free."""

from __future__ import annotations

import msgspec

from farm.program.layers import Layer
from farm.suites.suite import Job

BUNDLE = "bundle"


class CompileRequest(msgspec.Struct, frozen=True, tag="compile"):
    """Compile this to write intermediate outputs, and compute the references."""

    job: Job
    versions: dict[str, str]
    sample: int
    """Which of the inputs of the case."""
    folder: str
    """An empty folder; the bundle will be in BUNDLE in it."""


class Written(msgspec.Struct, frozen=True):
    """What one execution wrote."""

    etdump: str
    outputs: str
    """The intermediate ones, to which the ETDump refers."""


class CompareRequest(msgspec.Struct, frozen=True, tag="compare"):
    """Compare what the compiled program wrote."""

    simulator: Written
    device: Written | None = None
    """None where there is none."""


class DebugReply(msgspec.Struct, frozen=True):
    """How a request went."""

    ok: bool
    reason: str = ""
    """One line; empty when ok."""
    infra: bool = False
    """The machine is at fault (no space, no permission), not the job."""
    refused: bool = False
    """The job may be in order, but its layers cannot be told apart."""
    seconds: dict[str, float] = {}
    """Wall time by step."""
    packed_layers: bytes = b""
    """As msgpack, as JSON has no infinities."""
    notes: tuple[str, ...] = ()
    """What a reader of the result should know."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that were compared, in the order of execution."""
        return msgspec.msgpack.decode(self.packed_layers, type=tuple[Layer, ...]) if self.packed_layers else ()
