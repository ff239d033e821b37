"""How a device drifts: what its canary and its jobs take now, through what they took before. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from farm.report.model.chart import Chart, ChartPoint, chart
from farm.report.model.format import milliseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.health import HealthEvent
    from farm.store.queries.browse import DeviceAttempt

LEAST_BEFORE = 3
"""So many earlier values make a history."""


class Drift(msgspec.Struct, frozen=True):
    """How many times as long something takes now; ratios are medians, and 1 is no drift."""

    canary_ratio: float | None
    """The newest canary through the median of those before; None with fewer than three of them."""
    canaries: int
    """Canaries that measured something."""
    jobs_ratio: float | None
    """The same, median over jobs, of runs with the newest one's fingerprint; None where no job has enough."""
    jobs: int
    """Jobs that it is taken over."""


def drift_of(events: Sequence[HealthEvent], attempts: Sequence[DeviceAttempt]) -> Drift:
    """Return the drift of a device; both are newest first."""
    canaries = [median for event in events if (median := canary_p50(event)) is not None]
    ratios = []
    by_job: dict[tuple[str, str, str], list[float]] = {}
    newest: dict[str, tuple[str, str, str]] = {}
    for one in attempts:
        if one.verdict == "passed" and one.latency_ns is not None:
            if one.private:
                # Whatever somebody changes is no device's doing.
                continue
            key = one.job_id, one.fingerprint, one.case_version
            # Numbers of another toolchain say nothing of the device.
            if newest.setdefault(one.job_id, key) == key:
                by_job.setdefault(key, []).append(one.latency_ns)
    for values in by_job.values():
        ratio = _ratio(values)
        if ratio is not None:
            ratios.append(ratio)
    return Drift(_ratio(canaries), len(canaries), statistics.median(ratios) if ratios else None, len(ratios))


def canary_chart(events: Sequence[HealthEvent]) -> Chart | None:
    """Return what the canary took, by time; None with fewer than two values. `events` are newest first."""
    points = [
        ChartPoint(
            event.time_ms, median, f"canary, then {event.state}", event.time_ms, bad=event.event == "canary_failed"
        )
        for event in reversed(events)
        if (median := canary_p50(event)) is not None
    ]
    return chart("canary p50", points, lambda value: f"{milliseconds(value / 1e6)} ms") if len(points) > 1 else None


def canary_p50(event: HealthEvent) -> float | None:
    """Return the median of what a canary took, in ns; None of an event that measured nothing."""
    finite = [value for value in event.latency_ns if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _ratio(values: Sequence[float]) -> float | None:
    """Return the first through the median of the others."""
    now, *before = values or (math.nan,)
    if len(before) < LEAST_BEFORE:
        return None
    usual = statistics.median(before)
    return now / usual if usual > 0 and math.isfinite(now / usual) else None
