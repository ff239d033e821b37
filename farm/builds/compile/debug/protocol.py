"""Messages between `farm debug` and its compiler process, one JSON line each way. Torch-free."""

from __future__ import annotations

import math
import re

import msgspec

from farm.base.errors import UsageError
from farm.builds.program.layers import Layer
from farm.suites.suite import Job

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
