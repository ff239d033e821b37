"""Drift of a device: times of its health checks and jobs now, divided by earlier times. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.health import HealthEvent
    from farm.store.queries.browse import DeviceAttempt

LEAST_BEFORE = 3
"""Least number of earlier values for a comparison."""


class Drift(msgspec.Struct, frozen=True):
    """Ratios of present to earlier times; ratios are medians, and 1 is no drift."""

    health_check_ratio: float | None
    """Newest health check divided by the median of earlier ones; None with fewer than three of them."""
    health_checks: int
    """Number of health checks with a measurement."""
    jobs_ratio: float | None
    """Median over jobs, each by runs with its newest fingerprint; None when no job has enough runs."""
    jobs: int
    """Number of jobs in `jobs_ratio`."""


def drift_of(events: Sequence[HealthEvent], attempts: Sequence[DeviceAttempt]) -> Drift:
    """Return the drift of a device; `events` and `attempts` are newest first."""
    health_checks = [median for event in events if (median := health_check_p50(event)) is not None]
    ratios = []
    by_job: dict[tuple[str, str, str], list[float]] = {}
    newest: dict[str, tuple[str, str, str]] = {}
    for one in attempts:
        if one.verdict == "passed" and one.latency_ns is not None:
            if one.private:
                # A local run may have changed code, so its times do not show drift.
                continue
            key = one.job_id, one.fingerprint, one.case_version
            # Numbers of another toolchain do not describe the device.
            if newest.setdefault(one.job_id, key) == key:
                by_job.setdefault(key, []).append(one.latency_ns)
    for values in by_job.values():
        ratio = _ratio(values)
        if ratio is not None:
            ratios.append(ratio)
    return Drift(_ratio(health_checks), len(health_checks), statistics.median(ratios) if ratios else None, len(ratios))


def health_check_p50(event: HealthEvent) -> float | None:
    """Return the median time of a health check in ns; None for an event without a measurement."""
    finite = [value for value in event.latency_ns if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _ratio(values: Sequence[float]) -> float | None:
    """Return the first value divided by the median of the others."""
    now, *before = values or (math.nan,)
    if len(before) < LEAST_BEFORE:
        return None
    usual = statistics.median(before)
    return now / usual if usual > 0 and math.isfinite(now / usual) else None
