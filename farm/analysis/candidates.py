"""Step 1: does a run look different from those before it? Pure: docs/regressions.md."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.analysis.robust import difference, median_and_mad, p_of_next, sigma_of_next
from farm.analysis.scale import GATES, Gates, Scale, Series, change_text, scaled, unscaled
from farm.results.attempt import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

BASELINE = 21
"""A run is compared with so many before it, at most."""
LEAST_BASELINE = 8
"""And with so many at least."""

# So many sigmas a run is seldom too good by chance: once in forty.
_LUCK = 2.0


class Finding(StrEnum):
    """What a run's number is against those before it."""

    INSUFFICIENT_DATA = "insufficient_data"
    UNCHANGED = "unchanged"
    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    CHANGED = "changed"
    """Of a metric of which neither way is better."""
    UNDEFINED = "undefined"
    """It is no number that can be compared."""


CANDIDATES = frozenset({Finding.REGRESSION, Finding.IMPROVEMENT, Finding.CHANGED})
"""Findings that are worth a confirmation; of an exact metric they need none."""
_NOT_STANDING_OUT = (Finding.UNCHANGED, Finding.INSUFFICIENT_DATA)


class Judgement(msgspec.Struct, frozen=True):
    """One run against those before it."""

    finding: Finding
    reason: str
    """One line."""
    count: int
    """Runs that it was compared with."""
    baseline: float = math.nan
    """Their median, in the metric's unit; of an exact metric the value before. NaN where there is none."""
    change: float = math.nan
    """From the baseline, on the scale of the series; NaN where there is none."""
    sigmas: float = math.nan
    """The change in what the history varies by; inf where it repeats to the bit."""
    sigma: float = math.nan
    """What the history varies by, on the scale of the series; NaN where too little is known."""
    p_value: float = 1.0
    """Of the change by chance alone, either way."""


def judge(
    series: Series, history: Sequence[float], value: float, *, shift: float = 0.0, gates: Gates | None = None
) -> Judgement:
    """Compare `value` with the values of comparable runs before it, oldest first.

    `shift` is what the whole night was off by, on the scale of the series (`farm.analysis.nights`): it is taken out.
    """
    if series.exact:
        return _judge_exact(series, history, value)
    scale, gates = series.scale, gates or GATES[series.scale]
    before = scaled(scale, history)
    now = float(scaled(scale, [value])[0]) - shift
    before = before[~np.isnan(before)][-BASELINE:]
    count = len(before)
    if math.isnan(now):
        return Judgement(Finding.UNDEFINED, f"{value} cannot be compared", count)
    if count < LEAST_BASELINE:
        return Judgement(Finding.INSUFFICIENT_DATA, f"{count} comparable runs, {LEAST_BASELINE} are needed", count)
    median, mad = median_and_mad(before)
    if not math.isfinite(mad):
        return Judgement(Finding.UNDEFINED, "the runs before vary between finite and infinite values", count)
    change = difference(now, median)
    sigma = sigma_of_next(mad, count)
    sigmas = change / sigma if sigma else math.copysign(math.inf, change) if change else 0.0
    finding = Finding.UNCHANGED
    if abs(change) > gates.change and abs(sigmas) > gates.sigmas:
        finding = way(series.direction, change)
    return Judgement(
        finding,
        _reason(scale, change, sigmas, count),
        count,
        unscaled(scale, median),
        change,
        sigmas,
        sigma,
        p_of_next(sigmas, count) if change else 1.0,
    )


def may_hide_regression(series: Series, judgement: Judgement) -> bool:
    """Tell whether a number may have got worse by what makes a candidate, with luck having kept it from being one.

    That is worth a confirmation where it is known that something changed. With too few runs everything may be.
    """
    if series.direction is None or judgement.finding not in _NOT_STANDING_OUT:
        return False
    if judgement.finding is Finding.INSUFFICIENT_DATA:
        return True
    worse = judgement.change if series.direction is Direction.LOWER else -judgement.change
    return worse + _LUCK * judgement.sigma > GATES[series.scale].change


def way(direction: Direction | None, change: float) -> Finding:
    """Return what a change is, up where it is positive: for the worse, for the better, or just a change."""
    if direction is Direction.LOWER:
        return Finding.REGRESSION if change > 0 else Finding.IMPROVEMENT
    if direction is Direction.HIGHER:
        return Finding.IMPROVEMENT if change > 0 else Finding.REGRESSION
    return Finding.CHANGED


def _judge_exact(series: Series, history: Sequence[float], value: float) -> Judgement:
    before = [one for one in history if not math.isnan(one)]
    count = len(before)
    if math.isnan(value):
        return Judgement(Finding.UNDEFINED, f"{value} cannot be compared", count)
    if not before:
        return Judgement(Finding.INSUFFICIENT_DATA, "no comparable run", 0)
    last = before[-1]
    if value == last:
        return Judgement(Finding.UNCHANGED, f"{value:.15g}, as before", count, last, 0.0, 0.0, 0.0)
    reason = f"{last:.15g} -> {value:.15g}{'' if series.unit == '1' else f' {series.unit}'}"
    was, now = scaled(series.scale, [last, value])
    change = difference(float(now), float(was))
    sigmas = math.copysign(math.inf, value - last)
    return Judgement(way(series.direction, value - last), reason, count, last, change, sigmas, 0.0, 0.0)


def _reason(scale: Scale, change: float, sigmas: float, count: int) -> str:
    against = f"against the median of {count} runs"
    if math.isinf(sigmas):
        return f"{change_text(scale, change)} {against}, which repeat exactly"
    return f"{change_text(scale, change)} {against}, {abs(sigmas):.1f} times what they vary by"
