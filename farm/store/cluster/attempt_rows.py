"""Insertion of the results of several jobs of a run, with as many statements for twenty attempts as for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql import insert

from farm.store import rows, schema, values
from farm.store.attempt_fields import columns_of
from farm.store.details import bounded, detail_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.results.attempt import Attempt
    from farm.store.cluster.records import ShardResult
    from farm.store.records import ArtifactRecord

_PLANNED = text("""
    SELECT job.name, run_job.id, run_job.job_id FROM run_job JOIN job ON job.id = run_job.job_id
    WHERE run_job.run_id = :run AND run_job.job_id IN (SELECT id FROM job WHERE name = ANY(:jobs))
""")
_DEVICES = text("""
    SELECT serial, max(id) AS id FROM device JOIN run_device ON run_device.device_id = device.id
    WHERE run_device.run_id = :run AND serial = ANY(:serials) GROUP BY serial
""")
_SERIES = text("SELECT job_id, metric, unit, direction, exact, id FROM series WHERE job_id = ANY(:jobs)")

_attempt = schema.attempt.c
_INSERT = insert(schema.attempt).on_conflict_do_nothing().returning(_attempt.id, _attempt.run_job_id, _attempt.digest)


def insert_results(connection: Connection, run_id: str, results: Iterable[ShardResult]) -> None:
    """Insert the attempts of jobs of a run, with all their numbers; recorded ones stay as they are."""
    listed = [
        (bounded(attempt), result.artifacts if n == len(result.attempts) else ())
        for result in results
        for n, attempt in enumerate(result.attempts, 1)
    ]
    known = _PlannedRows(connection, run_id, [attempt for attempt, _ in listed])
    if len(listed) == 1 or not all(known.is_plain(attempt) for attempt, _ in listed):
        for attempt, artifacts in listed:
            rows.insert_attempt(connection, run_id, attempt, None, artifacts)
        return
    found = {
        (*known.jobs[attempt.job_id], values.attempt_digest(attempt)): (attempt, artifacts)
        for attempt, artifacts in listed
    }
    new = [
        {
            "run_job_id": run_job_id,
            "digest": digest,
            "device_id": known.devices.get(attempt.device),
            "recorded_ms": rows.now_ms(),
            **columns_of(attempt),
        }
        for (run_job_id, _, digest), (attempt, _) in found.items()
    ]
    ids = {(row.run_job_id, row.digest): row.id for row in connection.execute(_INSERT, new)}
    _insert_numbers(
        connection,
        known,
        [
            (ids[run_job_id, digest], job_id, attempt, artifacts)
            for (run_job_id, job_id, digest), (attempt, artifacts) in found.items()
            if (run_job_id, digest) in ids
        ],
    )


class _PlannedRows:
    """Row ids of the jobs, devices and series of some attempts."""

    def __init__(self, connection: Connection, run_id: str, attempts: Sequence[Attempt]) -> None:
        asked: dict[str, Any] = {"run": run_id, "jobs": sorted({attempt.job_id for attempt in attempts})}
        self.jobs = {row.name: (row.id, row.job_id) for row in connection.execute(_PLANNED, asked)}
        asked["serials"] = sorted({attempt.device for attempt in attempts if attempt.device})
        self.devices = {row.serial: row.id for row in connection.execute(_DEVICES, asked)}
        self.series: dict[int, dict[tuple[str, str, str, bool], int]] = {}
        for job, metric, unit, direction, exact, id_ in connection.execute(
            _SERIES, {"jobs": sorted({job_id for _, job_id in self.jobs.values()})}
        ):
            self.series.setdefault(job, {})[metric, unit, direction, exact] = id_

    def is_plain(self, attempt: Attempt) -> bool:
        """Return whether an attempt can be inserted without further queries or checks."""
        has_device = not attempt.device or attempt.device in self.devices
        return bool(attempt.started_ms) and attempt.job_id in self.jobs and has_device


def _insert_numbers(
    connection: Connection, known: _PlannedRows, inserted: Sequence[tuple[int, int, Attempt, Sequence[ArtifactRecord]]]
) -> None:
    """Insert the numbers and artifacts of attempts, each with its id and the id of its job's row."""
    floats, integers = [], []
    for attempt_id, job_id, attempt, _ in inserted:
        keys = [(row.metric, row.unit, str(row.direction), row.exact) for row in attempt.measurements]
        ids = known.series.get(job_id, {})
        if any(key not in ids for key in keys):
            ids = known.series[job_id] = rows.series_ids(connection, job_id, keys)
        more_floats, more_integers = rows.measurement_rows(attempt_id, attempt.measurements, ids)
        floats += more_floats
        integers += more_integers
    comparisons, operators, layers, artifacts = [], [], [], []
    for attempt_id, _, attempt, files in inserted:
        comparisons += detail_rows(attempt_id, attempt.comparisons)
        operators += detail_rows(attempt_id, attempt.operators)
        layers += detail_rows(attempt_id, attempt.layers)
        artifacts += rows.artifact_rows(attempt_id, files)
    rows.insert_rows(connection, schema.comparison, comparisons)
    rows.insert_rows(connection, schema.measurement, floats)
    rows.insert_rows(connection, schema.counter, integers)
    rows.insert_rows(connection, schema.op_profile, operators)
    rows.insert_rows(connection, schema.layer, layers)
    rows.insert_missing(connection, schema.artifact, artifacts)
