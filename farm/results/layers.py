"""First diverging layer and its cause, from the figures of every layer, one step at a time. Pure.

A layer is computed in up to four ways, and each step compares two neighbours of this chain:

    FP32 on the CPU  -quantization-  quantized on the CPU  -compiler-  simulator  -device-  device

A step diverges at the first layer, in the order of execution, that meets any of these conditions:

* it has no comparable value: NaN or infinities instead of numbers, or a constant instead of varying values;
* its SQNR is below the floor of the step;
* its SQNR is below the suspect level of the step, and at least DROP_DB below the worst SQNR of its inputs: the layer
  adds an error instead of passing one on.

Between compiler and device, a greatest difference of one step of the layer's own quantization is rounding and never
counts, however few steps the whole layer has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.results.attempt import LayerComparison

FLOOR_DB = {LayerStep.QUANTIZATION: 10.0, LayerStep.COMPILER: 15.0, LayerStep.DEVICE: 15.0}
"""Below it two values have little to do with each other: at 10 dB the noise is a third of the signal."""
SUSPECT_DB = {LayerStep.QUANTIZATION: 20.0, LayerStep.COMPILER: 30.0, LayerStep.DEVICE: 30.0}
"""8-bit layers that are in order have 30 to 45 dB against FP32, and rounding alone keeps 35 dB and more between two
ways of computing the same quantized layer; errors that are handed on for fifty layers still leave 25 dB."""
DROP_DB = 10.0
ROUNDING_STEPS = 1.01
"""Quantization steps, with what float32 adds to a difference of one."""


class Divergence(msgspec.Struct, frozen=True):
    """First divergence of a step."""

    layer: str
    operator: str
    step: LayerStep
    """The likely cause."""
    why: str
    """`SQNR 5.9 dB, its inputs 41.2 dB`."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Diagnosis from the figures."""

    first: Divergence | None
    """First divergence of all steps; for two at a layer, the earlier step's. None for no divergence."""
    steps: dict[LayerStep, Divergence]
    """The first of each step that diverges anywhere."""


def diagnose(layers: Sequence[Layer]) -> Diagnosis:
    """Return which of `layers`, in the order of execution, diverges first, and at which step."""
    by_name = {layer.name: layer for layer in layers}
    found: dict[LayerStep, Divergence] = {}
    first: Divergence | None = None
    for layer in layers:
        for step in LayerStep:
            gap = layer.gaps.get(step)
            if gap is None or step in found:
                continue
            why = _why(step, gap, _worst_input(layer, step, by_name))
            if why:
                found[step] = Divergence(layer.name, layer.operator, step, why)
                first = first or found[step]
    return Diagnosis(first, found)


def layer_comparisons(layers: Sequence[Layer], diagnosis: Diagnosis) -> tuple[LayerComparison, ...]:
    """Return the records of `layers`: a row for every known step, in the order of execution."""
    return tuple(
        LayerComparison(
            layer=layer.name,
            operator=layer.operator,
            step=step,
            mse=gap.mse,
            sqnr_db=gap.sqnr_db,
            cosine=gap.cosine,
            diverges=step in diagnosis.steps and diagnosis.steps[step].layer == layer.name,
        )
        for layer in layers
        for step in LayerStep
        if (gap := layer.gaps.get(step)) is not None
    )


def _worst_input(layer: Layer, step: LayerStep, by_name: Mapping[str, Layer]) -> float:
    """Return the least SQNR of what `layer` reads, through layers of which nothing is known; inf where none is."""
    worst = math.inf
    seen: set[str] = set()
    left = list(layer.inputs)
    while left:
        name = left.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        gap = by_name[name].gaps.get(step)
        if gap is None:
            left += by_name[name].inputs
        elif gap.sqnr_db is not None:
            worst = min(worst, gap.sqnr_db)
    return worst


def _why(step: LayerStep, gap: Gap, inputs_db: float) -> str:
    if gap.problem:
        return gap.problem
    sqnr = gap.sqnr_db
    if sqnr is None or (step is not LayerStep.QUANTIZATION and gap.steps is not None and gap.steps <= ROUNDING_STEPS):
        return ""
    before = "equal" if inputs_db == math.inf else f"{inputs_db:.1f} dB"
    if sqnr < SUSPECT_DB[step] and inputs_db - sqnr >= DROP_DB:
        return f"SQNR {sqnr:.1f} dB, its inputs {before}"
    if sqnr < FLOOR_DB[step]:
        return f"SQNR {sqnr:.1f} dB, little by little: its inputs {before}"
    return ""
