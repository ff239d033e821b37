"""All series of one run: suspected changes, devices that are off as a whole. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from farm.results.analysis.robust import NORMAL, difference, median, median_and_mad
from farm.results.analysis.scale import GATES, TURNS, Scale, Series, change_text, scaled
from farm.results.analysis.suspected import SUSPECTED, Judgement, judge, on_place

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
    count: int
    """Series that it was found in."""
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

    pasts = {id(one): one.past for one in observations}

    def judged(one: Observation, shift: float = 0.0) -> Judgement:
        return judge(one.series, pasts[id(one)], one.value, shift=shift, is_open=one.is_open)

    judgements = [judged(one) for one in observations]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(observations):
        if not one.series.exact and one.series.scale is Scale.RATIO and math.isfinite(judgements[index].change):
            groups.setdefault((one.device, one.series.metric), []).append(index)
    shifts = []
    for key, members in groups.items():
        if key not in programs and (shift := _shift(key, members, judgements)):
            recent = [_recent_change(observations[index], pasts[id(observations[index])]) for index in members]
            least = max(GATES[Scale.RATIO].confirmed, _NEW_SHARE * abs(shift.change))
            if abs(median(recent)) > least:
                shifts.append(shift)
            for index in members:
                judgements[index] = judged(observations[index], shift.change)
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
    return DeviceShift(device, metric, middle, len(members), tuple(usual[:REPRESENTATIVES]), reason)
