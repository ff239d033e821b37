"""One alert for each series and step, grouped by the runs between which it came: what bench/regressions.py counts."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.candidates import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    ranges_of: dict[tuple[str, Finding], list[RunRange]] = {}
    for alert in known:
        ranges_of.setdefault((alert.series, alert.finding), []).append(alert.range)
    new = []
    for alert in found:
        ranges = ranges_of.setdefault((alert.series, alert.finding), [])
        if not any(_overlap(alert.range, one) for one in ranges):
            new.append(alert)
            ranges.append(alert.range)
    return tuple(new)


def grouped(alerts: Iterable[Alert]) -> tuple[AlertGroup, ...]:
    """Return alerts by range of runs, the oldest first."""
    ordered = sorted(alerts, key=lambda one: (one.range, *_severity(one)))
    return tuple(AlertGroup(range_, tuple(group)) for range_, group in groupby(ordered, key=lambda one: one.range))


def _overlap(one: RunRange, other: RunRange) -> bool:
    return one.last_good_ms < other.first_bad_ms and other.last_good_ms < one.first_bad_ms


def _severity(alert: Alert) -> tuple[bool, float, str]:
    return alert.finding is not Finding.REGRESSION, -abs(alert.change), alert.series
