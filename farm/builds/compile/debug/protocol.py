"""What `farm debug` and its compiler process send each other, one JSON line each way. Torch-free."""

from __future__ import annotations

import math
import re

import msgspec

from farm.base.errors import UsageError
from farm.builds.program.layers import Layer
from farm.suites.suite import Job

BUNDLE = "bundle"
ETRECORD = "etrecord.bin"
"""What ExecuTorch keeps of the graph for its own tools; beside the bundle."""

_METRIC = re.compile(r"(?P<module>\.?[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)(?:=(?P<threshold>[^=]+))?")


class UserMetric(msgspec.Struct, frozen=True):
    """A comparator of the user's."""

    module: str
    """`my_pkg.metrics`; `.metrics` is beside the suite."""
    name: str
    threshold: float | None = None
    """None: the one that the class has by itself."""

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
            f"--metric {text}: expected MODULE:CLASS or MODULE:CLASS=THRESHOLD, such as my_pkg.metrics:Cosine"
        )
    if threshold is not None and not math.isfinite(threshold):
        raise UsageError(f"--metric {text}: the threshold must be a finite number, such as 0.95")
    return UserMetric(match["module"], match["name"], threshold)


def no_module(metric: UserMetric, name: str) -> UsageError:
    """Return the refusal of a metric of whose module `name`, that or what it is in, is not there."""
    return UsageError(
        f"--metric {metric}: there is no module {name}: put its folder on PYTHONPATH, or the file beside the suite and "
        "write --metric .metrics:Name"
    )


class CompileRequest(msgspec.Struct, frozen=True, tag="compile"):
    """Compile this to write intermediate outputs, and compute the references."""

    job: Job
    versions: dict[str, str]
    sample: int
    """Which of the inputs of the case."""
    folder: str
    """An empty folder; the bundle will be in BUNDLE in it, and the ETRecord in ETRECORD."""
    metrics: tuple[UserMetric, ...] = ()
    """What judges the layers in place of farm's own limits."""


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
    """The job may be in order, but its layers cannot be told apart, or a comparator of the user's cannot compare."""
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
