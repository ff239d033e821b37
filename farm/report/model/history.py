"""Values over runs: tables of a job's history, and drift of a device. Pure."""

from __future__ import annotations

import math
import statistics
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from farm.base.grouping import grouped
from farm.results.analysis.history import changed_facts, fact_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farm.devices.device import HealthEvent
    from farm.store.queries.browse import DeviceAttempt
    from farm.store.records import HistoryPoint


# Histories of jobs, run by run -> tables: a row per attempt, a column per metric, and changed conditions. Pure.


USUAL = (
    "latency", "decode_rate", "prefill_rate", "htp_cycles", "pte_size", "sqnr_fp32[0]", "dsp_heap_difference",
)  # fmt: skip
"""Metrics that a history of devices shows by default."""
_USUAL_VIRTUAL = ("pte_size", "partitions", "delegated_ops", "fallback_ops", "sqnr_fp32[0]")
"""Metrics that a history of virtual devices shows by default: costs of the program that no host has a part in."""
_SUCCESSORS = {"load_time": "model_load_time", "warm_load_time": "warm_model_load_time"}
"""Metrics that runners no longer measure, and their successors: docs/explanation/verdicts.md."""
# Facts that change with a commit; the next set has facts of the command line. Neither is a tool.
_OF_A_COMMIT = frozenset({"commit", "dirty", "executorch", "executorch_content", "native_runner"})
_MOST_WORDS = 3
_OF_THE_COMMAND = frozenset({"heap", "profile", "seconds"})


def ended(points: Iterable[HistoryPoint]) -> list[str]:
    """Return a line for each metric that the newest passed attempt lacks, with the metric measured in its place."""
    newest: dict[str, HistoryPoint] = {}
    for point in sorted(points, key=lambda point: point.time_ms):
        if point.metric in _SUCCESSORS and point.verdict == "passed":
            newest[point.metric] = point
    return [
        f"{metric} has ended: runners measure {_SUCCESSORS[metric]} in its place, without verification"
        for metric, point in newest.items()
        if point.value is None
    ]


class HistoryRow(msgspec.Struct, frozen=True):
    """Attempt in a history."""

    first: HistoryPoint
    """First of the attempt's points, which agree in all facts except the metric."""
    figures: tuple[HistoryPoint | None, ...]
    """Point of each metric of the table, in the order of its columns."""
    change: str
    """Changed conditions since the previous attempt, in a few words."""


class HistoryTable(msgspec.Struct, frozen=True):
    """History of one job on one kind of device, oldest attempt first."""

    job_id: str
    kind: str
    metrics: tuple[str, ...]
    units: tuple[str, ...]
    others: tuple[str, ...]
    """Other metrics of the job."""
    rows: tuple[HistoryRow, ...]


def tables(
    points: Sequence[HistoryPoint], wanted: Sequence[str], facts: Mapping[str, Mapping[str, str]]
) -> list[HistoryTable]:
    """Return the tables of points from `store.history.points`; `facts` are fingerprints by their hash."""
    ordered = sorted(points, key=lambda point: (point.job_id, point.device_kind, point.time_ms, point.run_id))
    groups = groupby(ordered, key=lambda point: (point.job_id, point.device_kind))
    return [_table(list(group), wanted, facts) for _, group in groups]


def what_changed(before: HistoryPoint, now: HistoryPoint, facts: Mapping[str, Mapping[str, str]]) -> str:
    """Return the changed conditions of an attempt in a few words; `facts` are fingerprints by their hash."""
    change = _difference(*({**facts.get(one.fingerprint, {}), **one.device_facts} for one in (before, now)))
    if before.case_version == now.case_version:
        return change
    return f"another test under the same name{f', {change}' if change else ''}"


def changed_texts(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the changes between two fingerprints in words, by fact."""
    return {name: fact_text(name, old or None, new or None) for name, (old, new) in changed_facts(was, now).items()}


def _difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    texts = changed_texts(was, now)
    if was.get("commit") and now.get("commit") and "commit" in texts:
        # Facts that follow from the commit are left out; independent changes are named.
        named = [texts[name] for name in ("commit", "dirty") if name in texts]
        others = [texts[name] for name in sorted(texts.keys() - _OF_A_COMMIT)]
        return ", ".join([*named, *(others if len(named + others) <= _MOST_WORDS else ["other tools"])])
    if len(texts) > 1 and not _OF_THE_COMMAND.issuperset(texts):
        return "new toolchain"
    return ", ".join(texts.values())


def _table(
    points: Sequence[HistoryPoint], wanted: Sequence[str], facts: Mapping[str, Mapping[str, str]]
) -> HistoryTable:
    units = {point.metric: point.unit for point in points if point.metric}
    usual = _USUAL_VIRTUAL if points[0].device_kind == "virtual" and wanted is USUAL else wanted
    metrics = tuple(metric for metric in usual if metric in units)
    rows: list[HistoryRow] = []
    for _, attempt in groupby(points, key=lambda point: (point.time_ms, point.run_id)):
        values = {point.metric: point for point in attempt}
        first = next(iter(values.values()))
        # A local run is no predecessor of later attempts.
        before = next((row.first for row in reversed(rows) if not row.first.local), rows[-1].first if rows else first)
        change = what_changed(before, first, facts)
        rows.append(HistoryRow(first, tuple(values.get(metric) for metric in metrics), change))
    return HistoryTable(
        job_id=points[0].job_id,
        kind=points[0].device_kind,
        metrics=metrics,
        units=tuple("ms" if units[metric] == "ns" else units[metric].removesuffix("1") for metric in metrics),
        others=tuple(sorted(units.keys() - set(metrics))),
        rows=tuple(rows),
    )


# Drift of a device: times of its health checks and jobs now, divided by earlier times. Pure.


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
    # A local run may have changed code, so its times do not show drift.
    passed = (one for one in attempts if one.verdict == "passed" and not one.private and one.latency_ns is not None)
    by_job = grouped((one.job_id, ((one.fingerprint, one.case_version), one.latency_ns)) for one in passed)
    # Numbers of another toolchain do not describe the device.
    newest = ([latency or 0.0 for key, latency in found if key == found[0][0]] for found in by_job.values())
    ratios = [ratio for values in newest if (ratio := _ratio(values)) is not None]
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
