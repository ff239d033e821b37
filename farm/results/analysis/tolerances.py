"""Suggested limits: the worst measured value of each figure, with a margin of its spread. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from farm.suites.figures import COMPARED, FIGURES, Direction, Figure
from farm.suites.suite import Limits

# Least margin, and the unit of rounding away from the worst value, in the unit of the figure.
_LEAST = {
    "sqnr_db": (2.0, 0.5),
    "worst_position_db": (2.0, 0.5),
    "prefill_db": (2.0, 0.5),
    "loss_db": (0.5, 0.5),
    "steps": (0.5, 0.5),
    "margin": (0.05, 0.05),
}
# Margin of other figures as a share of the worst value, and digits of rounding.
_LEAST_SHARE, _DIGITS = 0.5, 2
# Limit for equal outputs, as in suites of float32, whose rounding errors lie above it.
_MOST_SQNR_DB = 100.0


class MeasuredOutput(NamedTuple):
    """Output of an execution against a reference."""

    place: str
    """Target and kind of device: `SM8650-htp, virtual`."""
    reference: str
    figures: Mapping[str, Sequence[float]]
    """Values by name, one per sample or the worst alone."""


class SuggestedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Limit in force and suggested limit."""

    reference: str
    figure: str
    now: float | None
    """Limit in force; None for none."""
    suggested: float
    worst: float
    median: float
    worst_place: str
    observations: int
    written: float
    """Limit to write: `suggested`, or `now` if that is tighter and must not be loosened."""

    @property
    def would_loosen(self) -> bool:
        """True if the suggestion is looser than the limit in force."""
        return self.now is not None and FIGURES[self.figure].breaks(self.suggested, self.now)


def suggest_limits(observations: Iterable[MeasuredOutput], in_force: Mapping[str, Limits]) -> list[SuggestedLimit]:
    """Return a limit for each deciding figure, in the order of figures: limits in force, and the default ones.

    The margin is the distance of the worst value from the median, at least the figure's least margin. Raises ValueError
    with the place for values that are not finite.
    """
    seen = list(observations)
    found = []
    for reference, limits in in_force.items():
        mine = [one for one in seen if one.reference == reference]
        usual = _usual(reference, seen)
        for figure in COMPARED:
            now = getattr(limits, figure.name)
            values = [(value, one.place) for one in mine for value in one.figures.get(figure.name, ())]
            if values and (now is not None or figure.name in usual):
                found.append(_suggest(figure, reference, values, now))
    return found


def _usual(reference: str, seen: Sequence[MeasuredOutput]) -> set[str]:
    """Return the figures that decide by default, as in quantized_ops (docs/reference/suites.md)."""
    has_steps = any(one.figures.get("steps") for one in seen if one.reference == "quantized")
    if reference == "quantized":
        return {"steps", "mismatch"} if has_steps else {"sqnr_db", "worst_position_db", "mismatch"}
    is_quantized = any(one.reference == "quantized" for one in seen)
    return {"sqnr_db", "mismatch", "loss_db"} if is_quantized else {"sqnr_db", "mismatch", "peak"}


def _suggest(figure: Figure, reference: str, values: Sequence[tuple[float, str]], now: float | None) -> SuggestedLimit:
    worst = figure.worst([value for value, _ in values])
    place = next(place for value, place in values if value == worst or math.isnan(value))
    if math.isnan(worst) or (math.isinf(worst) and not (figure.direction is Direction.HIGHER and worst > 0)):
        raise ValueError(f"{figure.word} against {reference} has no finite value on {place}: nothing can be suggested")
    median = statistics.median(value for value, _ in values)
    limit = _limit(figure, worst, median)
    is_tighter = now is not None and figure.breaks(limit, now)
    return SuggestedLimit(
        reference=reference,
        figure=figure.name,
        now=now,
        suggested=limit,
        worst=worst,
        median=median,
        worst_place=place,
        observations=len(values),
        written=now if now is not None and is_tighter else limit,
    )


def _limit(figure: Figure, worst: float, median: float) -> float:
    if math.isinf(worst):
        return _MOST_SQNR_DB
    spread = abs(median - worst) if math.isfinite(median) else 0.0
    if figure.near_one:
        error = 1.0 - worst
        return round(1.0 - _rounded_up(error + max(error, spread)), 12)
    if figure.name in _LEAST:
        least, step = _LEAST[figure.name]
        room = max(least, spread)
        if figure.direction is Direction.HIGHER:
            return min(_MOST_SQNR_DB, max(figure.least, round(math.floor((worst - room) / step) * step, 6)))
        return math.ceil((max(worst, 0.0) + room) / step) * step
    return _rounded_up(worst + max(_LEAST_SHARE * worst, spread))


def _rounded_up(value: float) -> float:
    """Return a number of few digits that is not below `value`."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.{_DIGITS}g}")
