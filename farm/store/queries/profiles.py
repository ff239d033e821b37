"""Profiles of jobs; `farm.store.store.Store.profiles` says what is returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import case, func, or_, select

from farm.errors import UsageError
from farm.store import schema, values
from farm.store.details import operators_of
from farm.store.queries.history import matching_jobs
from farm.store.records import ArtifactRecord, ProfileRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Row

    from farm.store.database import Database

# Attempts of a statement: each of them may have thousands of rows.
_PART = 500


def profiles(connection: Connection, job_pattern: str, run_id: str | None) -> list[ProfileRecord]:
    """Return the newest profile of each job, by job id."""
    jobs = matching_jobs(connection, values.clean(job_pattern), None, run_id)
    newest = _newest(connection, jobs, run_id)
    if not newest:
        where = f"run {run_id}" if run_id else "the store"
        what = "any job" if job_pattern == "*" else job_pattern
        raise UsageError(
            f"{where} has no profile of {what}: 'farm run --profile detailed' keeps one "
            f"({len(jobs)} job{'' if len(jobs) == 1 else 's'} looked at)"
        )
    found: list[ProfileRecord] = []
    for start in range(0, len(newest), _PART):
        found += _records(connection, newest[start : start + _PART])
    return found


def _newest(connection: Connection, jobs: dict[int, str], run_id: str | None) -> Sequence[Row[Any]]:
    """Return the newest attempt with a profile of each job, by job id."""
    attempt, run_job, run, device = schema.attempt.c, schema.run_job.c, schema.run.c, schema.device.c
    kind = schema.artifact.c.kind
    rows = select(schema.op_profile.c.attempt_id).where(
        schema.op_profile.c.attempt_id == attempt.id, schema.op_profile.c.position == 0
    )
    files = select(schema.artifact.c.id).where(
        schema.artifact.c.attempt_id == attempt.id,
        or_(kind == "etdump", kind.startswith("optrace:"), kind.startswith("qhas:")),
    )
    order = (run.started_ms.desc(), attempt.id.desc())
    ranked = (
        select(
            attempt.id.label("attempt_id"),
            schema.job.c.name.label("job_id"),
            schema.job.c.backend,
            run.id.label("run_id"),
            case((attempt.started_ms > 0, attempt.started_ms), else_=run.started_ms).label("time_ms"),
            schema.fingerprint.c.facts,
            schema.suite_case.c.version,
            func.coalesce(device.serial, "").label("device"),
            func.coalesce(device.kind, "").label("device_kind"),
            attempt.verdict,
            func.row_number().over(partition_by=run_job.job_id, order_by=order).label("age"),
        )
        .select_from(
            schema.attempt.join(schema.run_job)
            .join(schema.run)
            .join(schema.fingerprint)
            .join(schema.job, schema.job.c.id == run_job.job_id)
            .join(schema.suite_case, schema.suite_case.c.id == run_job.case_id)
            .outerjoin(schema.device, device.id == attempt.device_id)
        )
        .where(run_job.job_id.in_(jobs), or_(rows.exists(), files.exists()))
    )
    if run_id is not None:
        ranked = ranked.where(run.id == run_id)
    newest = ranked.subquery()
    return connection.execute(select(newest).where(newest.c.age == 1).order_by(newest.c.job_id)).all()


def _records(connection: Connection, attempts: Sequence[Row[Any]]) -> list[ProfileRecord]:
    ids = [row.attempt_id for row in attempts]
    table, artifact = schema.op_profile, schema.artifact.c
    query = select(table).where(table.c.attempt_id.in_(ids)).order_by(table.c.attempt_id, table.c.position)
    operators = operators_of(connection.execute(query))
    files: dict[int, list[ArtifactRecord]] = {}
    for row in connection.execute(select(schema.artifact).where(artifact.attempt_id.in_(ids)).order_by(artifact.id)):
        files.setdefault(row.attempt_id, []).append(ArtifactRecord(row.sha256, row.size, row.kind))
    return [
        ProfileRecord(
            job_id=row.job_id,
            backend=row.backend,
            run_id=row.run_id,
            time_ms=row.time_ms,
            facts=row.facts,
            case_version=row.version,
            device=row.device,
            device_kind=row.device_kind,
            verdict=row.verdict,
            operators=operators.get(row.attempt_id, ()),
            artifacts=tuple(files.get(row.attempt_id, ())),
        )
        for row in attempts
    ]


class ProfileReader:
    """Profiles of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, job_pattern: str, run_id: str | None = None) -> list[ProfileRecord]:
        """Return the newest profile of each job that a pattern means (`HistoryReader`), of `run_id` where given.

        Raises UnknownNameError for a job that the store has never seen, UsageError where none has a profile.
        """
        with self._database.reading() as connection:
            return profiles(connection, job_pattern, run_id)
