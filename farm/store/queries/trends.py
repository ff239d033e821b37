"""What a report shows beside a run: what its jobs measured in the runs before, and the files that are kept of it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.queries.history import fingerprints, not_debugged
from farm.store.records import ArtifactRecord, Background, TrendPoint, TrendSeries
from farm.store.rows import chunks

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select

METRICS = ("latency", "htp_cycles", "sqnr_fp32[0]")

_ABOUT_THE_CODE = (Verdict.PASSED, Verdict.FAILED)


def background(connection: Connection, run_id: str, runs: int) -> Background:
    """Return the newest `runs` medians of METRICS, up to this run and on its kind of device, and its artifacts."""
    query = select(schema.fingerprint.c.facts).join(schema.run).where(schema.run.c.id == run_id)
    facts: Any = connection.scalar(query) or {}
    kind = facts.get("device_kind", "")
    rows: list[Any] = []
    for table, value in ((schema.measurement, schema.measurement.c.p50), (schema.counter, schema.counter.c.value)):
        rows += connection.execute(_medians(table, value, run_id, kind, runs)).all()
    # Of several attempts of a run, the last with a verdict about the code.
    rows.sort(key=lambda row: row[:3])
    known = {row.id: row for row in connection.execute(_series(run_id))}
    began = _runs(connection, {row[1] for row in rows})
    trends: dict[str, list[TrendSeries]] = {}
    for series_id, of_series in groupby(rows, key=lambda row: row[0]):
        newest = {row[1]: row for row in of_series}
        points = tuple(TrendPoint(of_run, *began[of_run], str(row[3]), row[4]) for of_run, row in newest.items())
        one = known[series_id]
        trends.setdefault(one.name, []).append(TrendSeries(one.metric, one.unit, one.direction, points))
    return Background(
        trends={name: tuple(series) for name, series in trends.items()},
        facts=fingerprints(connection, {fingerprint for _, fingerprint in began.values()}),
        artifacts=_artifacts(connection, run_id),
    )


def _series(run_id: str) -> Select[Any]:
    series, run_job = schema.series.c, schema.run_job.c
    return (
        select(series.id, series.metric, series.unit, series.direction, schema.job.c.name)
        .select_from(schema.run_job.join(schema.job).join(schema.series, series.job_id == schema.job.c.id))
        .where(run_job.run_id == run_id, series.metric.in_(METRICS))
    )


def _runs(connection: Connection, run_ids: set[str]) -> dict[str, tuple[int, str]]:
    """Return when runs began, and the hash of their fingerprints."""
    run = schema.run.c
    found: dict[str, tuple[int, str]] = {}
    for part in chunks(sorted(run_ids)):
        query = select(run.id, run.started_ms, run.fingerprint_hash).where(run.id.in_(part))
        found |= {row.id: (row.started_ms, row.fingerprint_hash) for row in connection.execute(query)}
    return found


def _medians(table: Any, value: Any, run_id: str, kind: str, runs: int) -> Select[Any]:
    """Return the query for series, run, attempt, case and median."""
    now, was, before = (schema.run_job.alias() for _ in range(3))
    run, attempt, fingerprint = schema.run.c, schema.attempt.c, schema.fingerprint.c
    of_kind = select(fingerprint.hash).where(fingerprint.facts["device_kind"].as_string() == kind)
    comparable = (run.fingerprint_hash.in_(of_kind), not_debugged())
    # For each job on its own, along the index of its runs, whose ids sort by time: where its newest runs begin.
    first = (
        select(before.c.run_id)
        .join(schema.run, run.id == before.c.run_id)
        .where(before.c.job_id == now.c.job_id, before.c.run_id <= run_id, *comparable)
        .order_by(before.c.run_id.desc())
        .offset(runs - 1)
        .limit(1)
        .correlate(now)
        .scalar_subquery()
    )
    starts = (
        select(now.c.job_id, func.coalesce(first, "").label("first")).where(now.c.run_id == run_id).subquery("starts")
    )
    return (
        select(table.c.series_id, was.c.run_id, attempt.id, was.c.case_id, value)
        .select_from(starts)
        .join(was, was.c.job_id == starts.c.job_id)
        .join(schema.run, run.id == was.c.run_id)
        .join(schema.attempt, attempt.run_job_id == was.c.id)
        .join(table, table.c.attempt_id == attempt.id)
        .join(schema.series, schema.series.c.id == table.c.series_id)
        .where(
            was.c.run_id >= starts.c.first,
            was.c.run_id <= run_id,
            attempt.verdict.in_(_ABOUT_THE_CODE),
            schema.series.c.metric.in_(METRICS),
            *comparable,
        )
    )


def _artifacts(connection: Connection, run_id: str) -> dict[str, tuple[ArtifactRecord, ...]]:
    artifact = schema.artifact.c
    query = (
        select(schema.job.c.name, artifact.sha256, artifact.size, artifact.kind)
        .select_from(schema.artifact.join(schema.attempt).join(schema.run_job).join(schema.job))
        .where(schema.run_job.c.run_id == run_id)
        .order_by(artifact.id)
    )
    found: dict[str, list[ArtifactRecord]] = {}
    for row in connection.execute(query):
        found.setdefault(row.name, []).append(ArtifactRecord(row.sha256, row.size, row.kind))
    return {name: tuple(records) for name, records in found.items()}
