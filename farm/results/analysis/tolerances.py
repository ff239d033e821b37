"""Limits that what was measured suggests: the worst of each figure, with a margin of its spread. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.suites.figures import COMPARED, FIGURES, Direction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.suites.figures import Figure
    from farm.suites.suite import Limits

# Least margin, and what the limit is rounded to away from the worst: in the unit of the figure.
_LEAST = {
    "sqnr_db": (2.0, 0.5),
    "worst_position_db": (2.0, 0.5),
    "prefill_db": (2.0, 0.5),
    "loss_db": (0.5, 0.5),
    "steps": (0.5, 0.5),
    "margin": (0.05, 0.05),
}
# Of other figures: as a share of the worst, rounded to so many digits.
_LEAST_SHARE, _DIGITS = 0.5, 2
# Of outputs that are equal: as suites have it for float32, whose rounding is above that.
_MOST_SQNR_DB = 100.0


class MeasuredOutput(NamedTuple):
    """One output of one execution against one reference."""

    place: str
    """Target and kind of device: `SM8650-htp, virtual`."""
    reference: str
    figures: Mapping[str, Sequence[float]]
    """By name, one of each sample, or the worst of them."""


class SuggestedLimit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit, now and as what was measured suggests it."""

    reference: str
    figure: str
    now: float | None
    """What is in force; None where nothing is."""
    suggested: float
    worst: float
    median: float
    worst_place: str
    observations: int
    written: float
    """What is to be written: `suggested`, or `now` where that is tighter and must not be loosened."""

    @property
    def would_loosen(self) -> bool:
        """Whether the suggestion allows more than what is in force."""
        return self.now is not None and FIGURES[self.figure].breaks(self.suggested, self.now)


def suggest_limits(
    observations: Iterable[MeasuredOutput], in_force: Mapping[str, Limits], *, margin: float = 1.0, looser: bool = False
) -> list[SuggestedLimit]:
    """Return a limit for each figure that is to decide, in the order of figures: those in force, and the usual ones.

    The margin is how far the worst is from the median, and a least one that each figure has, times `margin`. A limit in
    force is loosened only with `looser`. Raises ValueError, which names the place, for what is not finite.
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
                found.append(_suggest(figure, reference, values, now, margin, looser=looser))
    return found


def _usual(reference: str, seen: Sequence[MeasuredOutput]) -> set[str]:
    """Return which figures decide where nobody has said so: as in quantized_ops (docs/reference/suites.md)."""
    has_steps = any(one.figures.get("steps") for one in seen if one.reference == "quantized")
    if reference == "quantized":
        return {"steps", "mismatch"} if has_steps else {"sqnr_db", "worst_position_db", "mismatch"}
    is_quantized = any(one.reference == "quantized" for one in seen)
    return {"sqnr_db", "mismatch", "loss_db"} if is_quantized else {"sqnr_db", "mismatch", "peak"}


def _suggest(
    figure: Figure,
    reference: str,
    values: Sequence[tuple[float, str]],
    now: float | None,
    margin: float,
    *,
    looser: bool,
) -> SuggestedLimit:
    worst = figure.worst([value for value, _ in values])
    place = next(place for value, place in values if value == worst or math.isnan(value))
    if math.isnan(worst) or (math.isinf(worst) and not (figure.direction is Direction.HIGHER and worst > 0)):
        raise ValueError(f"{figure.word} against {reference} has no finite value on {place}: nothing can be suggested")
    median = statistics.median(value for value, _ in values)
    limit = _limit(figure, worst, median, margin)
    suggestion = SuggestedLimit(
        reference=reference,
        figure=figure.name,
        now=now,
        suggested=limit,
        worst=worst,
        median=median,
        worst_place=place,
        observations=len(values),
        written=limit,
    )
    if suggestion.would_loosen and not looser and now is not None:
        return msgspec.structs.replace(suggestion, written=now)
    return suggestion


def _limit(figure: Figure, worst: float, median: float, margin: float) -> float:
    if math.isinf(worst):
        return _MOST_SQNR_DB
    spread = abs(median - worst) if math.isfinite(median) else 0.0
    if figure.near_one:
        error = 1.0 - worst
        return 1.0 - _rounded_up(error + margin * max(error, spread))
    if figure.name in _LEAST:
        least, step = _LEAST[figure.name]
        room = margin * max(least, spread)
        if figure.direction is Direction.HIGHER:
            return min(_MOST_SQNR_DB, max(figure.least, round(math.floor((worst - room) / step) * step, 6)))
        return math.ceil((max(worst, 0.0) + room) / step) * step
    return _rounded_up(worst + margin * max(_LEAST_SHARE * worst, spread))


def _rounded_up(value: float) -> float:
    """Return a number of few digits that is not below `value`."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.{_DIGITS}g}")
