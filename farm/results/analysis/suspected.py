"""Step 1: suspected changes of one run against the runs before it, series by series and together. Pure:
docs/explanation/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from farm.results.analysis.statistics import (
    GATES,
    LEAST_SIGMA,
    NORMAL,
    TURNS,
    Scale,
    Series,
    change_text,
    difference,
    is_on_scale,
    level_sigma,
    median,
    median_and_mad,
    p_of_next,
    scaled,
    sigma_of_next,
    unscaled,
)
from farm.results.attempt import Direction
from farm.suites.figures import TIME_UNITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Suspected changes: numbers of a run against the runs before it, step 1. Pure: docs/explanation/statistics.md.


BASELINE = 21
"""Most runs that a run is compared with."""
LEAST_BASELINE = 8
"""Fewest runs that a run is compared with."""

SETTLED = 4
"""Newest runs that a run is compared with where the level got better before them."""

DETERMINISTIC = 3
"""Runs after which a figure of outputs that is equal to the last bit is deterministic: its changes need no pairs."""

# So many of the newest runs, or twice as many, have to be better than those before by that many standard errors.
_SETTLED_ERRORS = 1.5
_LEAST_OLD = 3
# Fewest values of a device or build for its effect, and the standard errors that the effect needs.
_LEAST_OF_PLACE = 3
_PLACE_ERRORS = 2.0
# A run is that many sigmas too good by chance once in forty times.
_LUCK_SIGMAS = 2.0


class Finding(StrEnum):
    """A run's number compared with those before it."""

    INSUFFICIENT_DATA = "insufficient_data"
    UNCHANGED = "unchanged"
    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    CHANGED = "changed"
    """Change of a metric without a better direction."""
    UNDEFINED = "undefined"
    """The number cannot be compared."""


SUSPECTED = frozenset({Finding.REGRESSION, Finding.IMPROVEMENT, Finding.CHANGED})
"""Findings to confirm by interleaved pairs; findings of exact metrics need none."""


class Judgement(msgspec.Struct, frozen=True):
    """A run's number compared with those before it."""

    finding: Finding
    reason: str
    """Reason in one line."""
    count: int
    """Runs that it was compared with."""
    baseline: float = math.nan
    """Their median, in the metric's unit; of an exact metric the value before. NaN where there is none."""
    change: float = math.nan
    """From the baseline, on the scale of the series; NaN where there is none."""
    sigmas: float = math.nan
    """Change in units of the history's variation; inf for a history without variation."""
    sigma: float = math.nan
    """Variation of the history on the scale of the series; NaN for too few values."""
    p_value: float = 1.0
    """Two-sided probability of the change by chance alone."""
    turns: int = 0
    """Changes of direction of an exact metric, this one included."""


def repeats(series: Series, values: Sequence[float]) -> bool:
    """Return whether a metric is exact, or a figure of outputs that is equal in the newest of `values`."""
    newest = values[-DETERMINISTIC:]
    return series.exact or (series.of_outputs and len(newest) == DETERMINISTIC and len(set(newest)) == 1)


def judge(
    series: Series, history: Sequence[float], value: float, *, shift: float = 0.0, is_open: bool = False
) -> Judgement:
    """Compare `value` with the values of comparable runs before it, oldest first.

    `shift`, on the scale of the series, is subtracted from the change: the shift of the whole nightly run
    (`farm.results.analysis.suspected`). A series with an alert that `is_open` has one gate for both directions.
    """
    if series.exact:
        return _judge_exact(series, history, value)
    scale, gates = series.scale, GATES[series.scale]
    before = [one for one in history if is_on_scale(scale, one)][-BASELINE:]
    count = len(before)
    if not is_on_scale(scale, value):
        return Judgement(Finding.UNDEFINED, f"{value} cannot be compared", count)
    if count < LEAST_BASELINE:
        return Judgement(Finding.INSUFFICIENT_DATA, f"{count} comparable runs, {LEAST_BASELINE} are needed", count)
    numbers, now = scaled(scale, before), float(scaled(scale, [value])[0]) - shift
    middle, mad = median_and_mad(numbers)
    if not math.isfinite(mad):
        return Judgement(Finding.UNDEFINED, "the runs before vary between finite and infinite values", count)
    sigma = sigma_of_next(mad, count)
    if start := settled(series, numbers):
        count -= start
        middle, sigma = median(numbers[start:]), sigma_of_next(level_sigma(numbers, 0.0) / NORMAL, count)
    change = difference(now, middle)
    sigmas = change / sigma if sigma else math.copysign(math.inf, change) if change else 0.0
    finding = way(series.direction, change)
    many, always = gates.sigmas, gates.always
    if finding is Finding.IMPROVEMENT and not is_open:
        many, always = gates.better_sigmas, gates.better_always
    if abs(change) <= gates.change or (abs(sigmas) <= many and abs(change) <= always):
        finding = Finding.UNCHANGED
    return Judgement(
        finding,
        _reason(scale, change, sigmas, count),
        count,
        unscaled(scale, middle),
        change,
        sigmas,
        sigma,
        p_of_next(sigmas, count) if change else 1.0,
    )


def may_hide_regression(series: Series, judgement: Judgement) -> bool:
    """Return whether noise of two sigmas may hide a regression of a number that is not suspected.

    With too few runs every number may be. Worth a confirmation where the program is known to have changed.
    """
    if series.direction is Direction.NONE or judgement.finding not in (Finding.UNCHANGED, Finding.INSUFFICIENT_DATA):
        return False
    if judgement.finding is Finding.INSUFFICIENT_DATA:
        return True
    if judgement.sigma == 0.0 and series.unit in TIME_UNITS:
        # A clock coarser than the noise gives equal times: changes below a tick are invisible.
        return True
    worse = judgement.change if series.direction is Direction.LOWER else -judgement.change
    return worse + _LUCK_SIGMAS * judgement.sigma > GATES[series.scale].change


def way(direction: Direction, change: float) -> Finding:
    """Return the finding for a change, positive for a rise, of a metric whose better values lie in `direction`."""
    if direction is Direction.LOWER:
        return Finding.REGRESSION if change > 0 else Finding.IMPROVEMENT
    if direction is Direction.HIGHER:
        return Finding.IMPROVEMENT if change > 0 else Finding.REGRESSION
    return Finding.CHANGED


def levelled(scale: Scale, values: Sequence[float], steps: Mapping[int, float]) -> list[float]:
    """Return `values`, oldest first, with known steps taken out, so that all are on the level of the last one.

    `steps` has the confirmed change, on `scale`, by the index of the first value of the new level. Values before an
    infinite step (outputs were equal and now differ) are NaN.
    """
    if not steps:
        return list(values)
    import numpy as np

    off = np.zeros(len(values))
    for index, change in steps.items():
        off[:index] += change if math.isfinite(change) else math.nan
    numbers = scaled(scale, values) + off
    # Values on the level stay unchanged to the last digit.
    return [
        unscaled(scale, float(number)) if by else value for value, number, by in zip(values, numbers, off, strict=True)
    ]


def on_place(
    scale: Scale, values: Sequence[float], places: Sequence[tuple[str, str]], place: tuple[str, str]
) -> list[float]:
    """Return `values`, oldest first, corrected for the known effects of their devices and builds against `place`.

    A place is a device and its build. Effects add up: the effect of a device comes from all its builds, and the effect
    of a build from all devices. Where the device of `place` has too few values, values of other devices are NaN.
    """
    import numpy as np

    numbers = scaled(scale, values)
    known = np.isfinite(numbers)
    rest = np.where(known, numbers - median(numbers[known]), math.nan) if known.any() else numbers
    offset = np.zeros(len(values))
    for axis, name in enumerate(place):
        names = np.array([one[axis] for one in places])
        groups = {str(one): known & (names == one) for one in {*names.tolist(), name}}
        spread = [rest[group] - median(rest[group]) for group in groups.values() if group.sum() >= _LEAST_OF_PLACE]
        if len(groups) == 1 or not spread:
            continue
        _, mad = median_and_mad(np.concatenate(spread))
        effects = {one: _effect(rest[group], mad) for one, group in groups.items()}
        if axis == 0 and math.isnan(effects[name]):
            return [value if one == name else math.nan for one, value in zip(names, values, strict=True)]
        own = np.nan_to_num([effects[one] for one in names.tolist()])
        rest = rest - own
        offset += float(np.nan_to_num(effects[name])) - own
    # Values without a correction stay unchanged to the last digit.
    return [
        unscaled(scale, float(number + by)) if by else value
        for value, number, by in zip(values, numbers, offset, strict=True)
    ]


def _effect(rest: NDArray[np.float64], mad: float) -> float:
    """Return the effect of a device or build from what its values are off by: 0 for chance, NaN for too few values."""
    if len(rest) < _LEAST_OF_PLACE:
        return math.nan
    effect, error = median(rest), NORMAL * mad * math.sqrt(math.pi / 2.0 / len(rest))
    return effect if abs(effect) > _PLACE_ERRORS * error else 0.0


def reference(series: Series, values: Sequence[float], steps: Mapping[int, float]) -> int:
    """Return the index of the run to confirm a suspected change against, among those before the new one, oldest first.

    The oldest run of the baseline on its level is chosen, because newer ones may have the step already. `steps` as in
    `levelled`.
    """
    oldest = max(0, len(values) - BASELINE, *steps)
    return oldest + settled(series, scaled(series.scale, levelled(series.scale, values, steps)[oldest:]))


def settled(series: Series, before: NDArray[np.float64]) -> int:
    """Return the index in `before`, on the scale, where their newest level begins, if it is a better one; else 0.

    Improvements, each too small to be a suspected change, would else be credit for what gets worse after them.
    """
    import numpy as np

    if series.direction is Direction.NONE or not np.isfinite(before).all():
        return 0
    count = len(before)
    sigma = level_sigma(before, LEAST_SIGMA * GATES[series.scale].change)
    for new in (SETTLED, 2 * SETTLED):
        old = count - new
        if old >= _LEAST_OLD:
            gain = median(before[:old]) - median(before[old:])
            error = sigma * math.sqrt(math.pi / 2.0 * (1.0 / new + 1.0 / old))
            sign = -1.0 if series.direction is Direction.HIGHER else 1.0
            if sign * gain > _SETTLED_ERRORS * error:
                return count - SETTLED
    return 0


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
    digits = 10 if series.of_outputs else 15
    reason = f"{last:.{digits}g} -> {value:.{digits}g}{'' if series.unit == '1' else f' {series.unit}'}"
    was, now = scaled(series.scale, [last, value])
    steps = [after - one for one, after in pairwise([*before, value]) if after != one]
    turns = sum(one * after < 0.0 for one, after in pairwise(steps))
    if turns >= TURNS:
        reason += f", the change of direction number {turns} in {count + 1} runs: not deterministic"
    sigmas = math.copysign(math.inf, value - last)
    change = difference(float(now), float(was))
    # After that only a value beyond all others is news.
    is_known = turns > TURNS and min(before) <= value <= max(before)
    finding = Finding.CHANGED if is_known else way(series.direction, value - last)
    return Judgement(finding, reason, count, last, change, sigmas, 0.0, 0.0, turns)


def _reason(scale: Scale, change: float, sigmas: float, count: int) -> str:
    against = f"against the median of {count} runs"
    if math.isinf(sigmas):
        return f"{change_text(scale, change)} {against}, which repeat exactly"
    return f"{change_text(scale, change)} {against}, {abs(sigmas):.1f} times their deviation"


# All series of one run: suspected changes, devices that are off as a whole. Pure: docs/explanation/statistics.md.


LEAST_SERIES = 8
"""Fewest series of a device and metric for a shift of the device."""
REPRESENTATIVES = 3
"""Series of a shifted device that are confirmed, to separate device and programs."""

# The median of a device's series has to be off by that many times what chance moves it by.
_SHIFT_SIGMAS = 4.0
# A shift is news where that share of it came since the nights just before: devices drift for weeks.
_NEW_SHARE = 0.7
_RECENT = 5


class Observation(msgspec.Struct, frozen=True):
    """Series in a nightly run."""

    series: Series
    device: str
    history: Sequence[float]
    """Values of the comparable runs before, oldest first, with known steps taken out (`levelled`)."""
    value: float
    places: Sequence[tuple[str, str]] = ()
    """Device and build of each value in the history and of the new one; empty if all are equal."""
    is_open: bool = False
    """True for a series with an open alert."""

    @property
    def past(self) -> Sequence[float]:
        """Return the history as it would have been on the device of the new value, with its build."""
        if self.series.exact or len(set(self.places)) < 2:
            return self.history
        return on_place(self.series.scale, self.history, self.places[:-1], self.places[-1])


class DeviceShift(msgspec.Struct, frozen=True):
    """A device on which one metric of all series is off in one run."""

    device: str
    metric: str
    change: float
    """Median over its series, a logarithm of the ratio."""
    representatives: tuple[int, ...]
    """Observations with the most usual change: what to confirm for `programs_are_cause`."""
    reason: str
    """Reason in one line."""


class RunJudgement(msgspec.Struct, frozen=True):
    """Judgement of a nightly run. Numbers are indices of observations."""

    judgements: tuple[Judgement, ...]
    """Judgement of each observation, without the shift of its device."""
    shifts: tuple[DeviceShift, ...]
    """Shifts that began with this nightly run; earlier ones are taken out of changes without a report."""
    suspected: tuple[int, ...]
    """To be confirmed, the least probable first."""
    exact: tuple[int, ...]
    """Exact metrics that changed: they need no confirmation."""
    flipping: tuple[int, ...] = ()
    """Exact metrics that turn out not to be deterministic tonight."""


def judge_run(observations: Sequence[Observation], *, programs: Collection[tuple[str, str]] = ()) -> RunJudgement:
    """Judge all series of a nightly run.

    The common change of a device's series is one shift, and each series is judged by its change beyond it. `programs`
    has devices and metrics whose shift was confirmed to come from programs: their series are judged unchanged.
    """
    pasts = [one.past for one in observations]

    def judged(index: int, shift: float = 0.0) -> Judgement:
        one = observations[index]
        return judge(one.series, pasts[index], one.value, shift=shift, is_open=one.is_open)

    judgements = [judged(index) for index in range(len(observations))]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(observations):
        if not one.series.exact and one.series.scale is Scale.RATIO and math.isfinite(judgements[index].change):
            groups.setdefault((one.device, one.series.metric), []).append(index)
    shifts = []
    for key, members in groups.items():
        if key not in programs and (shift := _shift(key, members, judgements)):
            recent = [_recent_change(observations[index], pasts[index]) for index in members]
            least = max(GATES[Scale.RATIO].confirmed, _NEW_SHARE * abs(shift.change))
            if abs(median(recent)) > least:
                shifts.append(shift)
            for index in members:
                judgements[index] = judged(index, shift.change)
    found = [index for index, judgement in enumerate(judgements) if judgement.finding in SUSPECTED]
    exact = tuple(index for index in found if observations[index].series.exact)
    noisy = [index for index in found if not observations[index].series.exact]
    noisy.sort(key=lambda index: (judgements[index].p_value, observations[index].series.id))
    flipping = tuple(index for index, judgement in enumerate(judgements) if judgement.turns == TURNS)
    return RunJudgement(tuple(judgements), tuple(shifts), tuple(noisy), exact, flipping)


def _recent_change(one: Observation, past: Sequence[float]) -> float:
    """Return the change from the last few values; 0 if unknown."""
    *before, now = scaled(one.series.scale, [*past[-_RECENT:], one.value])
    change = difference(float(now), median(before))
    return change if math.isfinite(change) else 0.0


def _shift(key: tuple[str, str], members: Sequence[int], judgements: Sequence[Judgement]) -> DeviceShift | None:
    if len(members) < LEAST_SERIES:
        return None
    middle, mad = median_and_mad([judgements[index].change for index in members])
    # A few changes are close to each other by luck; what their histories vary by is known better.
    own = median([judgements[index].sigma for index in members])
    by_chance = max(NORMAL * mad, own) * math.sqrt(math.pi / 2.0 / len(members))
    if abs(middle) <= max(GATES[Scale.RATIO].confirmed, _SHIFT_SIGMAS * by_chance):
        return None
    usual = sorted(members, key=lambda index: abs(judgements[index].change - middle))
    device, metric = key
    reason = f"{metric} of all {len(members)} series of {device} is off by {change_text(Scale.RATIO, middle)}"
    return DeviceShift(device, metric, middle, tuple(usual[:REPRESENTATIVES]), reason)
