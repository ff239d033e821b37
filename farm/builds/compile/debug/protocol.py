"""Messages between `farm debug` and its compiler process, one JSON line each way, and the caller's end. Torch-free."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import UsageError
from farm.builds.compile.processes import CompilerEnding, CompilerProcess
from farm.builds.compile.watched import take_node
from farm.builds.program.layers import Layer
from farm.builds.toolchains.interpreters import process_environment
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Compiler


BUNDLE = "bundle"
ETRECORD = "etrecord.bin"
"""File beside the bundle with ExecuTorch's record of the graph for its own tools."""

_METRIC = re.compile(r"(?P<module>\.?[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)(?:=(?P<threshold>[^=]+))?")


class UserMetric(msgspec.Struct, frozen=True):
    """Comparator of the user."""

    module: str
    """`my_pkg.metrics`; `.metrics` is beside the suite."""
    name: str
    threshold: float | None = None
    """None for the default of the class."""

    def __str__(self) -> str:
        limit = "" if self.threshold is None else f"={self.threshold}"
        return f"{self.module}:{self.name}{limit}"


def parse_metric(text: str) -> UserMetric:
    """Return the comparator of `my_pkg.metrics:Cosine` or `my_pkg.metrics:Cosine=0.95`. Raises UsageError."""
    match = _METRIC.fullmatch(text)
    try:
        threshold = float(match["threshold"]) if match and match["threshold"] else None
    except ValueError:
        match = None
    if match is None:
        raise UsageError(
            f"--comparator {text}: expected MODULE:CLASS or MODULE:CLASS=THRESHOLD, such as my_pkg.metrics:Cosine"
        )
    if threshold is not None and not math.isfinite(threshold):
        raise UsageError(f"--comparator {text}: the threshold must be a finite number, such as 0.95")
    return UserMetric(match["module"], match["name"], threshold)


def refusal(metric: UserMetric, problem: str) -> UsageError:
    """Return the error for a comparator that cannot be used."""
    return UsageError(f"--comparator {metric}: {problem}")


def no_module(metric: UserMetric, name: str) -> UsageError:
    """Return the error for a metric whose module, or a package above it, is missing: `name`."""
    place = "put its folder on PYTHONPATH, or the file beside the suite and write --comparator .metrics:Name"
    return refusal(metric, f"no module {name}: {place}")


class CompileRequest(msgspec.Struct, frozen=True, tag="compile"):
    """Request to compile a job with intermediate outputs, and to compute the references."""

    job: Job
    versions: dict[str, str]
    sample: int
    """Number of the sample among the inputs of the case."""
    folder: str
    """Empty folder; the bundle will be in BUNDLE in it, and the ETRecord in ETRECORD."""
    metrics: tuple[UserMetric, ...] = ()
    """Comparators that judge the layers in place of farm's own limits."""


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
    """True for a job that may be correct, without layers to compare or with a failing comparator of the user."""
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

_FIND = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec(sys.argv[1]) is None else 0)"
_MISSING = 3
_FIND_SECONDS = 60.0


def require_modules(
    supervisor: Supervisor, compiler: Compiler, metrics: Sequence[UserMetric], suite_folder: Path
) -> None:
    """Raise UsageError for the first of `metrics` without a module, as the compiler process would later.

    The toolchain's interpreter looks for the module without importing code of the user.
    """
    for metric in metrics:
        first, *_ = metric.module.removeprefix(".").split(".")
        if metric.module.startswith("."):
            if not (suite_folder / first).is_dir() and not any(suite_folder.glob(f"{first}.*")):
                raise no_module(metric, f"{first} in {suite_folder}")
            continue
        argv = [compiler.python, "-c", _FIND, first]
        child = supervisor.spawn(argv, name="metric", env=process_environment(compiler.env))
        with child.limited(_FIND_SECONDS):
            code = child.process.wait()
        if code == _MISSING:
            raise no_module(metric, first)


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
