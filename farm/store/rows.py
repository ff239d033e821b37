"""Conversion of values to rows, and insertion of rows: the steps of the store's transactions."""

from __future__ import annotations

import functools
import secrets
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Insert, Table, select, update

from farm.base.errors import StoreLostError
from farm.devices.device import Device, common_kind
from farm.store import schema, values
from farm.store.attempt_fields import columns_of
from farm.store.details import detail_rows
from farm.store.records import ArtifactRecord, RunKind
from farm.store.statements import chunks, statement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy.dialects import postgresql, sqlite

    from farm.results.attempt import Attempt, Measurement
    from farm.suites.suite import Job

_SeriesKey = tuple[str, str, str, bool]
_SERIES_KEY = ("metric", "unit", "direction", "exact")


def now_ms() -> int:
    """Return the time; epoch, milliseconds."""
    return time.time_ns() // 1_000_000


def new_run_id(started_ms: int) -> str:
    """Return an id that sorts by time, to the second, with a random part against equal ids of other machines."""
    return values.run_id_time(started_ms) + secrets.token_hex(3)


def run_kinds(command: str, facts: Mapping[str, str]) -> dict[str, str | None]:
    """Return the columns of a run for its kind and its kind of device."""
    device_kind = facts.get("device_kind")
    known = None if device_kind is None else values.clean(device_kind, values.KIND_LIMIT)
    return {"run_kind": RunKind.of(command, facts), "run_device_kind": known}


def require_run(connection: Connection, run_id: str) -> None:
    """Raise StoreLostError for a run that is not in the store."""
    branch_of_run(connection, run_id)


def branch_of_run(connection: Connection, run_id: str) -> tuple[str, bool]:
    """Return the branch that a run belongs to or is compared with, and True for a local run. Raises StoreLostError."""
    run = schema.run.c
    found = connection.execute(select(run.run_branch, run.run_private).where(run.id == run_id)).first()
    if found is None:
        raise StoreLostError(f"run {run_id} is not in the store: begin_run makes one")
    return found[0], found[1]


def find_planned(connection: Connection, run_id: str, job_id: str, serial: str = "") -> tuple[int, int, int | None]:
    """Return the ids of the rows in `run_job` and `job`, and in `device` for a device of the run with this serial.

    Raises StoreLostError for a job that is not planned.
    """
    planned = {"run": run_id, "job": job_id, "serial": serial}
    row = connection.execute(statement("recording.planned"), planned).first()
    if row is None:
        raise _not_planned(run_id, job_id)
    return row[0], row[1], row[2]


def planned_jobs(connection: Connection, run_id: str, job_ids: Collection[str]) -> dict[str, int]:
    """Return the ids of the rows in `run_job` by job id. Raises StoreLostError for a job that is not planned."""
    job, planned = schema.job.c, schema.run_job.c
    found: dict[str, int] = {}
    for part in chunks(job_ids):
        query = select(job.name, planned.id).where(planned.run_id == run_id, planned.job_id == job.id)
        found.update((row.name, row.id) for row in connection.execute(query.where(job.name.in_(part))))
    for job_id in job_ids:
        if job_id not in found:
            raise _not_planned(run_id, job_id)
    return found


def _not_planned(run_id: str, job_id: str) -> StoreLostError:
    return StoreLostError(f"run {run_id} has no job {job_id}: plan_jobs makes its jobs known")


def insert_jobs(
    connection: Connection, jobs: Sequence[Job], versions: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Insert new jobs and cases; return the row ids of both by job id.

    `versions` has the version of each job's case, by job id.
    """
    # All writers insert in the same order: two of them never wait for each other.
    ordered = sorted(jobs, key=lambda job: job.id)
    insert_missing(connection, schema.job, [_job_row(job) for job in ordered])
    key_of = {job.id: (job.case.suite, values.case_column(job.case.name), versions[job.id]) for job in ordered}
    cases = {key_of[job.id]: job.case.module for job in ordered}
    names = ("suite", "case_name", "version")
    rows = [{**dict(zip(names, key, strict=True)), "module": module} for key, module in sorted(cases.items())]
    insert_missing(connection, schema.suite_case, rows)

    job, case = schema.job.c, schema.suite_case.c
    job_ids: dict[str, int] = {}
    for part in chunks([job.id for job in jobs]):
        found = connection.execute(select(job.name, job.id).where(job.name.in_(part)))
        job_ids.update((row.name, row.id) for row in found)
    row_of: dict[tuple[str, str, str], int] = {}
    for part in chunks({version for _, _, version in cases}):
        found = connection.execute(select(schema.suite_case).where(case.version.in_(part)))
        row_of.update(((row.suite, row.case_name, row.version), row.id) for row in found)
    return job_ids, {job.id: row_of[key_of[job.id]] for job in jobs}


def insert_device(connection: Connection, run_id: str, device: Device, runtime: Mapping[str, str] | None = None) -> int:
    """Insert a device of a run with the versions of its runtime, and return its row id."""
    row = {
        "serial": values.clean(device.serial, values.NAME_LIMIT),
        "soc": values.clean(device.soc, values.SOC_LIMIT),
        "kind": values.clean(device.kind, values.KIND_LIMIT),
        "build": values.clean(device.build, values.NAME_LIMIT),
    }
    if device.soc_reported:
        runtime = {**(runtime or {}), "soc_reported": device.soc_reported}
    facts = runtime and {values.clean(name): values.clean(value) for name, value in runtime.items()}
    device_id = insert_device_row(connection, run_id, row, facts or None)
    _settle_device_kind(connection, run_id)
    return device_id


def _settle_device_kind(connection: Connection, run_id: str) -> None:
    """Update the kind of device of a run, and its fingerprint, from its devices; MIXED for devices of both kinds."""
    run, device, had = schema.run, schema.device, schema.run_device
    asked = select(run.c.run_device_kind, schema.fingerprint.c.facts).join(schema.fingerprint)
    asked_kind, facts = connection.execute(asked.where(run.c.id == run_id)).one()
    kinds = select(device.c.kind).join(had).where(had.c.run_id == run_id).distinct()
    kind = common_kind(connection.scalars(kinds))
    if asked_kind is None or kind in ("", asked_kind):
        return
    facts = {**facts, "device_kind": kind}
    key = values.fingerprint_hash(facts)
    insert_missing(connection, schema.fingerprint, [{"hash": key, "facts": facts}])
    settled = update(run).where(run.c.id == run_id).values(fingerprint_hash=key, run_device_kind=kind)
    connection.execute(settled)


def insert_device_row(
    connection: Connection, run_id: str, row: Mapping[str, str], runtime: Mapping[str, str] | None = None
) -> int:
    """Insert a device of a run, with the columns `row`, and return its row id."""
    insert_missing(connection, schema.device, [row])
    query = select(schema.device.c.id).where(*(schema.device.c[name] == value for name, value in row.items()))
    device_id: int = connection.execute(query).scalar_one()
    insert_missing(connection, schema.run_device, [{"run_id": run_id, "device_id": device_id, "runtime": runtime}])
    return device_id


def insert_attempt(
    connection: Connection,
    run_id: str,
    attempt: Attempt,
    device: Device | None,
    artifacts: Sequence[ArtifactRecord],
) -> None:
    """Insert an attempt with all its numbers and artifacts, unless it is recorded already."""
    planned = {"run": run_id, "job": attempt.job_id, "serial": attempt.device}
    found = connection.execute(statement("recording.planned_with_series"), planned).all()
    if not found:
        raise _not_planned(run_id, attempt.job_id)
    run_job_id, job_row_id, device_id = found[0][:3]
    series = {(metric, unit, direction, exact): id_ for *_, id_, metric, unit, direction, exact in found if id_}
    if device is not None:
        device_id = insert_device(connection, run_id, device)
    elif attempt.device and device_id is None:
        device_id = _insert_unknown_device(connection, run_id, attempt)
    # Without a start time, two attempts with equal content may still be different attempts.
    digest = values.attempt_digest(attempt) if attempt.started_ms else None
    row = {"run_job_id": run_job_id, "digest": digest, "device_id": device_id, "recorded_ms": now_ms()}
    insert_attempt_row(connection, row, job_row_id, attempt, artifacts, series)


def insert_attempt_row(
    connection: Connection,
    known: Mapping[str, Any],
    job_row_id: int,
    attempt: Attempt,
    artifacts: Sequence[ArtifactRecord],
    series: Mapping[_SeriesKey, int] | None = None,
) -> bool:
    """Insert an attempt with the columns `known`, all its numbers and artifacts; return False if recorded already.

    A recorded attempt has the same job, run and digest. `series` are known ids of series of the job.
    """
    row = {**known, **columns_of(attempt)}
    attempt_id = insert_new(connection, schema.attempt, row)
    if attempt_id is None:
        return False
    insert_rows(connection, schema.comparison, detail_rows(attempt_id, attempt.comparisons))
    _insert_measurements(connection, attempt_id, job_row_id, attempt.measurements, series)
    insert_rows(connection, schema.op_profile, detail_rows(attempt_id, attempt.operators))
    insert_rows(connection, schema.layer, detail_rows(attempt_id, attempt.layers))
    insert_missing(connection, schema.artifact, artifact_rows(attempt_id, artifacts))
    return True


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the missing rows; several writers may do so at once."""
    if rows:
        connection.execute(_inserting_ignoring(table, connection.dialect.name, returning=False), rows)


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any]) -> Any:
    """Insert a row and return its key; None for a row that exists already."""
    # RETURNING instead of the row count, which PostgreSQL's driver does not report here.
    statement = _inserting_ignoring(table, connection.dialect.name, returning=True)
    return connection.execute(statement, row).scalar()


def _job_row(job: Job) -> dict[str, Any]:
    return {
        "name": job.id,
        "suite": job.case.suite,
        "case_name": values.case_column(job.case.name),
        "soc": job.target.soc,
        "backend": job.target.backend,
        "precision": job.target.precision,
        "options": dict(job.target.options),
    }


def _insert_unknown_device(connection: Connection, run_id: str, attempt: Attempt) -> int:
    # The attempt must not be lost for missing facts about its device; `unknown` is compared with neither kind.
    soc = connection.execute(select(schema.job.c.soc).where(schema.job.c.name == attempt.job_id)).scalar_one()
    row = {"serial": attempt.device, "soc": soc, "kind": "unknown", "build": ""}
    return insert_device_row(connection, run_id, row)


def _insert_measurements(
    connection: Connection,
    attempt_id: int,
    job_row_id: int,
    measurements: Sequence[Measurement],
    series: Mapping[_SeriesKey, int] | None,
) -> None:
    keys = [(row.metric, row.unit, str(row.direction), row.exact) for row in measurements]
    ids = series if series is not None and all(key in series for key in keys) else None
    ids = series_ids(connection, job_row_id, keys) if ids is None else ids
    floats, integers = measurement_rows(attempt_id, measurements, ids)
    insert_rows(connection, schema.measurement, floats)
    insert_rows(connection, schema.counter, integers)


def measurement_rows(
    attempt_id: int, measurements: Sequence[Measurement], ids: Mapping[_SeriesKey, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of an attempt for `measurement`, and of exact metrics for `counter`; `ids` are ids of series."""
    keys = [(row.metric, row.unit, str(row.direction), row.exact) for row in measurements]
    floats, integers = [], []
    for position, (key, measurement) in enumerate(zip(keys, measurements, strict=True)):
        samples = measurement.samples
        row: dict[str, Any] = {
            "attempt_id": attempt_id,
            "position": position,
            "series_id": ids[key],
            "n": len(samples),
        }
        exact = values.as_integers(samples) if measurement.exact else None
        if exact is None:
            floats.append({**row, **values.statistics_of(samples), "samples": values.pack_floats(samples)})
        else:
            median = sorted(exact)[(len(exact) - 1) // 2]
            integers.append({**row, "value": median, "max": max(exact), "samples": values.pack_integers(exact)})
    return floats, integers


def series_ids(connection: Connection, job_row_id: int, keys: Sequence[_SeriesKey]) -> dict[_SeriesKey, int]:
    """Return the ids of series of a job; new series are inserted."""

    def known() -> dict[_SeriesKey, int]:
        rows = connection.execute(statement("recording.series"), {"job": job_row_id})
        return {(metric, unit, direction, exact): found for found, metric, unit, direction, exact in rows}

    ids = known()
    missing = sorted(set(keys) - ids.keys())
    if missing:
        rows = [{"job_id": job_row_id, **dict(zip(_SERIES_KEY, key, strict=True))} for key in missing]
        insert_missing(connection, schema.series, rows)
        ids = known()
    return ids


def artifact_rows(attempt_id: int, artifacts: Sequence[ArtifactRecord]) -> list[dict[str, Any]]:
    """Return the rows of artifacts of an attempt."""
    return [
        {
            "attempt_id": attempt_id,
            "sha256": artifact.sha256,
            "size": artifact.size,
            "kind": values.clean(artifact.kind, values.SOC_LIMIT),
        }
        for artifact in artifacts
    ]


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that no other writer inserts."""
    if rows:
        connection.execute(_inserting(table), rows)


# Cached: an attempt needs five such statements.
@functools.cache
def _inserting(table: Table) -> Insert:
    return table.insert()


@functools.cache
def _inserting_ignoring(table: Table, dialect: str, *, returning: bool) -> Insert:
    # Importing an unused dialect would take as long as opening the store.
    statement: sqlite.Insert | postgresql.Insert
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert

        statement = insert(table).on_conflict_do_nothing()
    else:
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        statement = postgresql_insert(table).on_conflict_do_nothing()
    return statement.returning(*table.primary_key.columns) if returning else statement
