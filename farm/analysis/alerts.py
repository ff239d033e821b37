"""Step 4: one alert for each series and step, grouped by the runs between which it came. Pure: docs/regressions.md."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.analysis.candidates import BASELINE, Finding
from farm.analysis.scale import Scale, scaled, unscaled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class RunRange(msgspec.Struct, frozen=True, order=True):
    """Between which runs a step came."""

    first_bad_ms: int
    """When that run began; epoch, milliseconds."""
    last_good_ms: int
    first_bad: str
    """Run id."""
    last_good: str
    """Run id. Runs in between are those that nobody could tell about."""


class Alert(msgspec.Struct, frozen=True):
    """A step of one series, to be told once."""

    series: str
    finding: Finding
    range: RunRange
    change: float
    """On the scale of the series, and its interval; of an exact metric all three are the same."""
    low: float
    high: float
    p_value: float
    reason: str
    """One line."""


class AlertGroup(msgspec.Struct, frozen=True):
    """All alerts of one range of runs: most likely one cause."""

    range: RunRange
    alerts: tuple[Alert, ...]
    """Regressions first, the greatest change first."""


def new_alerts(found: Iterable[Alert], known: Iterable[Alert]) -> tuple[Alert, ...]:
    """Return those of `found` that tell of a step that neither `known` nor an earlier one of `found` tells of.

    A step is the same where series and finding are, and the ranges overlap.
    """
    told: dict[tuple[str, Finding], list[RunRange]] = {}
    for alert in known:
        told.setdefault((alert.series, alert.finding), []).append(alert.range)
    new = []
    for alert in found:
        ranges = told.setdefault((alert.series, alert.finding), [])
        if not any(_overlap(alert.range, one) for one in ranges):
            new.append(alert)
            ranges.append(alert.range)
    return tuple(new)


def grouped(alerts: Iterable[Alert]) -> tuple[AlertGroup, ...]:
    """Return alerts by range of runs, the oldest first."""
    ordered = sorted(alerts, key=lambda one: (one.range, *_severity(one)))
    return tuple(AlertGroup(range_, tuple(group)) for range_, group in groupby(ordered, key=lambda one: one.range))


def levelled(scale: Scale, values: Sequence[float], steps: Mapping[int, float]) -> list[float]:
    """Return `values`, oldest first, with known steps taken out: all are on the level of the last one.

    `steps` has, by the index of the first value of a new level, the change that pairs found, on `scale`. So a series
    is judged from the night after a step, and the step is not found once more. A step that is not finite (outputs
    that were equal, and are not any more) cannot be taken out: what is before it is NaN.
    """
    if not steps:
        return list(values)
    off = np.zeros(len(values))
    for index, change in steps.items():
        off[:index] += change if math.isfinite(change) else math.nan
    numbers = scaled(scale, values) + off
    # What is on the level stays what it is, to the last digit.
    return [
        unscaled(scale, float(number)) if by else value for value, number, by in zip(values, numbers, off, strict=True)
    ]


def reference(runs: int, steps: Iterable[int]) -> int:
    """Return the index of the run whose bundle is the good one of a confirmation; `runs` are those before the new one.

    It is the oldest of the baseline that is on its level: the newest may have the step already, where it was too small
    for the first night. `steps` as in `levelled`.
    """
    return max(0, runs - BASELINE, *steps)


def _overlap(one: RunRange, other: RunRange) -> bool:
    return one.last_good_ms < other.first_bad_ms and other.last_good_ms < one.first_bad_ms


def _severity(alert: Alert) -> tuple[bool, float, str]:
    return alert.finding is not Finding.REGRESSION, -abs(alert.change), alert.series
