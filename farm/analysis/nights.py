"""All series of one night: what stands out, and what is off as a whole. Pure: docs/regressions.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.analysis.candidates import CANDIDATES, Judgement, judge
from farm.analysis.confirmation import Answer, Confirmation
from farm.analysis.robust import NORMAL, median, median_and_mad
from farm.analysis.scale import GATES, Gates, Scale, Series, change_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

LEAST_SERIES = 8
"""So many series of a device and metric can tell that it is the device."""
REPRESENTATIVES = 3
"""Of a device that is off: series of which pairs tell whether it is the night or the programs."""

# The median of a device's series has to be off by so many times what chance moves it by.
_SHIFT_SIGMAS = 4.0


class Observation(msgspec.Struct, frozen=True):
    """One series in one night."""

    series: Series
    device: str
    history: Sequence[float]
    """Values of the comparable runs before, oldest first, with known steps taken out (`farm.analysis.alerts`)."""
    value: float


class DeviceShift(msgspec.Struct, frozen=True):
    """A device on which one metric of all series is off in one night."""

    device: str
    metric: str
    change: float
    """Median over its series, a logarithm of the ratio."""
    count: int
    """Series that it was found in."""
    representatives: tuple[int, ...]
    """Observations that are off by the most usual amount: compare them in pairs, and ask `is_the_programs`."""
    reason: str
    """One line."""


class Night(msgspec.Struct, frozen=True):
    """What there is to do after a night."""

    judgements: tuple[Judgement, ...]
    """One for each observation; where its device is off, without what it is off by."""
    shifts: tuple[DeviceShift, ...]
    candidates: tuple[int, ...]
    """Observations that are to be confirmed, the least probable first."""
    exact: tuple[int, ...]
    """Observations of exact metrics that changed: they need no confirmation."""


def look(
    observations: Sequence[Observation],
    *,
    programs: Collection[tuple[str, str]] = (),
    gates: Mapping[Scale, Gates] = GATES,
) -> Night:
    """Judge all series of a night.

    A device on which everything is slower has not got hundreds of regressions: what its series share is one shift, and
    each is judged by what it is off beyond that. `programs` are devices and metrics of which pairs have shown that
    it is the programs after all: their series are judged as they are.
    """

    def judged(one: Observation, shift: float = 0.0) -> Judgement:
        return judge(one.series, one.history, one.value, shift=shift, gates=gates[one.series.scale])

    judgements = [judged(one) for one in observations]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(observations):
        if not one.series.exact and one.series.scale is Scale.RATIO and math.isfinite(judgements[index].change):
            groups.setdefault((one.device, one.series.metric), []).append(index)
    shifts = []
    for key, members in groups.items():
        if key not in programs and (shift := _shift(key, members, judgements)):
            shifts.append(shift)
            for index in members:
                judgements[index] = judged(observations[index], shift.change)
    found = [index for index, judgement in enumerate(judgements) if judgement.finding in CANDIDATES]
    exact = tuple(index for index in found if observations[index].series.exact)
    noisy = [index for index in found if not observations[index].series.exact]
    noisy.sort(key=lambda index: (judgements[index].p_value, observations[index].series.id))
    return Night(tuple(judgements), tuple(shifts), tuple(noisy), exact)


def is_the_programs(confirmations: Iterable[Confirmation]) -> bool:
    """Tell from pairs of a shift's representatives whether the programs are to blame: most of them are confirmed.

    Pairs are measured in turns on one device, so a hot night is in both sides and cancels.
    """
    answers = [one.answer for one in confirmations]
    return 2 * answers.count(Answer.CONFIRMED) > len(answers)


def _shift(key: tuple[str, str], members: Sequence[int], judgements: Sequence[Judgement]) -> DeviceShift | None:
    if len(members) < LEAST_SERIES:
        return None
    changes = np.array([judgements[index].change for index in members])
    sigmas = np.array([judgements[index].sigmas for index in members])
    middle, mad = median_and_mad(changes)
    # A few changes are close to each other by luck; what their histories vary by is known better.
    own = median(np.divide(changes, sigmas, out=np.zeros(len(members)), where=sigmas != 0.0))
    by_chance = max(NORMAL * mad, own) * math.sqrt(math.pi / 2.0 / len(members))
    if abs(middle) <= max(GATES[Scale.RATIO].confirmed, _SHIFT_SIGMAS * by_chance):
        return None
    usual = sorted(members, key=lambda index: abs(judgements[index].change - middle))
    device, metric = key
    reason = f"{metric} of all {len(members)} series of {device} is off by {change_text(Scale.RATIO, middle)}"
    return DeviceShift(device, metric, middle, len(members), tuple(usual[:REPRESENTATIVES]), reason)
