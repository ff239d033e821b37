"""Distance of an output from a reference, and its limits. Pure.

Formulae, with r the reference, a the actual output, both in float64, sums over all elements:

    SQNR    10 log10(sum r^2 / sum (r - a)^2), in dB; inf where they are equal
    cosine  sum r a / (|r| |a|)
    max_abs max |r - a|
    peak    max |r - a| / max |r|
    steps   max |r - a| / the quantization step of the output, to a hundredth, because float32 rounds multiples of it
    loss    SQNR of the quantized reference less SQNR of the output, both against FP32, in dB
    mismatch  share of elements with r != a, for integer and boolean outputs, the only figure of them

Elements that are NaN in both, or the same infinity in both, are equal and stay out of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.suites.figures import COMPARED, figure_fields
from farm.suites.suite import Limits

# Stands for a noise so small that its square underflows: unequal outputs must not look equal.
_LEAST_NOISE = float(np.finfo(np.float64).smallest_subnormal)


_FigureFields: Any = msgspec.defstruct("_FigureFields", figure_fields(), frozen=True)


class Figures(_FigureFields):  # type: ignore[misc]
    """Figures of an output against a reference: a field for each figure of farm/suites/figures.py.

    None: does not apply to the dtype, or has no value. `sqnr_db` is inf for equal outputs, and -inf if either output or
    reference alone is finite at an element; `cosine` has no value there. `steps` needs a quantized output, and
    `loss_db` an FP32 reference with a differing quantized one.
    """

    nan: int = 0
    """Elements that are NaN where the reference has a number."""
    infinite: int = 0
    """Elements of which exactly one side is infinite (or NaN in the reference only), or both with unlike signs."""


class Violation(msgspec.Struct, frozen=True):
    """Broken limit."""

    text: str
    """`sqnr 12.3 dB < 20 dB`."""
    excess: float
    """Ratio of the error to the limit, as an amplitude, so that kinds of limits can be compared."""


def compare(
    actual: NDArray[np.generic], reference: NDArray[np.generic], step: float | None = None, *, logits: bool = False
) -> Figures:
    """Return the figures of `actual` against `reference`: arrays of one shape and one dtype, any rank.

    `step` is the quantization step of the output, in its unit; `logits` is true for text generation.

    Raises ValueError when shapes or dtypes differ, or the dtype is neither boolean, integer nor floating point.
    """
    if actual.shape != reference.shape or actual.dtype != reference.dtype:
        raise ValueError(
            f"is {actual.dtype}{list(actual.shape)}, the reference is {reference.dtype}{list(reference.shape)}"
        )
    integers = reference.dtype.kind in "biu"
    if not integers and reference.dtype.kind != "f":
        raise ValueError(f"{reference.dtype} outputs cannot be compared")
    act, ref = actual.astype(np.float64), reference.astype(np.float64)
    if integers:
        figures = Figures(mismatch=float(np.mean(actual != reference)) if reference.size else 0.0)
    else:
        figures = _compare_floats(act, ref)
    found = {}
    if step is not None and figures.max_abs is not None:
        found["steps"] = round(figures.max_abs / step, 2) if step > 0 else math.inf
    if not (figures.nan or figures.infinite):
        for one in COMPARED:
            if one.compute is None or one.for_integers != integers or (one.of_logits and not logits):
                continue
            if (value := one.compute(act, ref)) is not None:
                found[one.name] = value
    return msgspec.structs.replace(figures, **found) if found else figures


def with_loss(figures: Figures, quantized: Figures) -> Figures:
    """Return `figures`, of an output against FP32, with the loss compared with the quantized reference.

    `quantized` has the figures of that reference against FP32. If it equals FP32, no loss has a value.
    """
    if figures.sqnr_db is None or quantized.sqnr_db is None or not math.isfinite(quantized.sqnr_db):
        return figures
    return msgspec.structs.replace(figures, loss_db=quantized.sqnr_db - figures.sqnr_db)


def _compare_floats(actual: NDArray[np.float64], reference: NDArray[np.float64]) -> Figures:
    finite = np.isfinite(actual) & np.isfinite(reference)
    same = (actual == reference) | (np.isnan(actual) & np.isnan(reference))
    odd = ~finite & ~same
    nan = int(np.count_nonzero(odd & np.isnan(actual)))
    infinite = int(np.count_nonzero(odd)) - nan
    if nan or infinite:
        return Figures(sqnr_db=-math.inf, max_abs=math.inf, peak=math.inf, nan=nan, infinite=infinite)
    act, ref = actual[finite], reference[finite]
    if bool(np.all(same)):
        return Figures(sqnr_db=math.inf, cosine=1.0, max_abs=0.0, peak=0.0)
    with np.errstate(over="ignore", under="ignore"):
        max_abs = float(np.max(np.abs(ref - act)))
        # A power of two changes no digit, and keeps the squares of the greatest float64 from overflowing.
        exponent = -int(np.frexp(max(float(np.max(np.abs(ref))), float(np.max(np.abs(act)))))[1])
        act, ref = np.ldexp(act, exponent), np.ldexp(ref, exponent)
        greatest = float(np.max(np.abs(ref)))
        peak = float(np.max(np.abs(ref - act))) / greatest if greatest else math.inf
        signal, noise = float(np.sum(ref * ref)), float(np.sum((ref - act) ** 2))
        norms = math.sqrt(signal) * math.sqrt(float(np.sum(act * act)))
        cosine = float(np.sum(ref * act)) / norms if norms else 0.0
    sqnr = 10.0 * (math.log10(signal) - math.log10(max(noise, _LEAST_NOISE))) if signal else -math.inf
    return Figures(sqnr_db=sqnr, cosine=min(1.0, max(-1.0, cosine)), max_abs=max_abs, peak=peak)


def worst(figures: Iterable[Figures]) -> Figures:
    """Return the worst of each figure: of one output over several samples. `figures` is not empty."""
    rows = list(figures)
    found = {}
    for figure in COMPARED:
        values = [value for row in rows if (value := getattr(row, figure.name)) is not None]
        found[figure.name] = figure.worst(values) if values else None
    return Figures(**found, nan=max(row.nan for row in rows), infinite=max(row.infinite for row in rows))


def violations(figures: Figures, limits: Limits) -> tuple[Violation, ...]:
    """Return the limits that `figures` break, worst first.

    NaN instead of a number is a violation without any limit; a stray infinity is one if any limit decides.
    """
    broken = []
    if figures.nan:
        broken.append(Violation(f"{figures.nan} elements are NaN where the reference has numbers", math.inf))
    decides = any(getattr(limits, name) is not None for name in limits.__struct_fields__)
    if figures.infinite and decides:
        broken.append(Violation(f"{figures.infinite} elements are not finite as in the reference", math.inf))
    if not (figures.nan or figures.infinite):
        broken += _beyond(figures, limits)
    return tuple(sorted(broken, key=lambda violation: -violation.excess))


def _beyond(figures: Figures, limits: Limits) -> list[Violation]:
    broken = []
    for figure in COMPARED:
        value, limit = getattr(figures, figure.name), getattr(limits, figure.name)
        if value is not None and limit is not None and figure.breaks(value, limit):
            broken.append(Violation(figure.broken_text(value, limit), figure.excess(value, limit)))
    return broken


def is_decided(figures: Figures, limits: Limits) -> bool:
    """Return whether a limit of `limits` applies to the dtype of `figures`, and some output would break it."""
    return any(
        figure.decides
        and getattr(figures, figure.name) is not None
        and (limit := getattr(limits, figure.name)) is not None
        and figure.can_break(limit)
        for figure in COMPARED
    )


def signal_problem(references: Sequence[NDArray[np.generic]]) -> str | None:
    """Return the reason why a wrong output may agree with the `references` of all samples; None for none.

    A broken operator may also return a constant, so that a constant reference cannot detect it. A single element is
    always constant and only has to differ from zero in a sample.
    """
    for sample, reference in enumerate(references):
        if reference.dtype.kind == "f" and bool(np.any(np.isnan(reference))):
            return f"has NaN in sample {sample}"
    first = next((reference.flat[0] for reference in references if reference.size), None)
    if first is None:
        return "is empty"
    if all(bool(np.all(reference == first)) for reference in references):
        of_all = "" if len(references) == 1 else f" in all {len(references)} samples"
        if not first:
            return f"is zero everywhere{of_all}"
        if any(reference.size > 1 for reference in references):
            return f"is the constant {first}{of_all}"
    return None


def is_equal(actual: NDArray[np.generic], reference: NDArray[np.generic], *, half: bool = False) -> bool:
    """Return whether two arrays have the same elements, NaN among them.

    `half`: compare in half precision, because HTP computes 1 as 0.9999999.
    """
    if half and reference.dtype.kind == "f":
        with np.errstate(over="ignore"):
            actual, reference = actual.astype(np.float16), reference.astype(np.float16)
    return np.array_equal(actual, reference, equal_nan=reference.dtype.kind == "f")
