"""What `farm debug` and its compiler process say to each other, one JSON line each way. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from farm.program.layers import Gap, Layer
from farm.suites.suite import Job

Number = float | Literal["inf", "-inf"] | None
"""A figure in JSON, which has no infinities."""


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


class WireGap(msgspec.Struct, frozen=True):
    """A Gap in JSON."""

    mse: Number
    sqnr_db: Number
    cosine: Number
    steps: Number = None
    problem: str = ""

    def gap(self) -> Gap:
        """Return what it stands for."""
        return Gap(
            from_wire(self.mse), from_wire(self.sqnr_db), from_wire(self.cosine), from_wire(self.steps), self.problem
        )


class ComparedLayer(msgspec.Struct, frozen=True):
    """One layer in JSON; gaps by step."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    gaps: dict[str, WireGap]
    inspector: WireGap | None = None
    """The simulator against ExecuTorch's own reference, as its Inspector reports it: quantized weights, but
    activations in floating point."""

    def layer(self) -> Layer:
        """Return what it stands for."""
        return Layer(self.name, self.operator, self.inputs, {step: gap.gap() for step, gap in self.gaps.items()})  # type: ignore[misc]


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
    layers: tuple[ComparedLayer, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the result should know."""


BUNDLE = "bundle"


def to_wire(value: float | None) -> Number:
    """Return a figure as JSON can have it; NaN, which says nothing, is None."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value


def from_wire(value: Number) -> float | None:
    """Return what `to_wire` was given."""
    return None if value is None else float(value)
