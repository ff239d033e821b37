"""How things stand: the run that somebody looks at in the morning, and what each of its jobs was before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.queries.history import not_debugged
from farm.store.queries.runs import resolve_run
from farm.store.records import Before, JobStatus, RunStatus, UnfinishedRun
from farm.store.rows import FEW, chunks, now_ms

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection, Row, ScalarSelect

    from farm.store.database import Database
    from farm.store.records import JobResult

_ABOUT_THE_CODE = (Verdict.PASSED, Verdict.FAILED)
_NIGHTLY = "nightly"
# A nightly run of last week is still what somebody wants to know of; one of last month is not.
_FRESH_MS = 8 * 86_400_000
# What is older and has no end was killed.
_RUNNING_MS = 86_400_000


def run_to_show(connection: Connection, time_ms: int) -> str | None:
    """Return the newest nightly run of late, or else the newest run; None where there is none."""
    run = schema.run.c
    newest = select(run.id).where(not_debugged()).order_by(run.started_ms.desc(), run.id.desc()).limit(1)
    nightly = newest.where(run.priority == _NIGHTLY, run.started_ms > time_ms - _FRESH_MS)
    return connection.scalar(nightly) or connection.scalar(newest)


def unfinished(connection: Connection, time_ms: int) -> list[UnfinishedRun]:
    """Return the runs of the last day that have no end, newest first: they run, or were killed."""
    run = schema.run.c
    query = (
        select(run.id, run.user_name, run.host, run.command, run.started_ms)
        .where(run.started_ms > time_ms - _RUNNING_MS, run.finished_ms.is_(None))
        .order_by(run.started_ms.desc())
    )
    return [
        UnfinishedRun(row.id, row.user_name, row.host, row.command, row.started_ms) for row in connection.execute(query)
    ]


def run_status(connection: Connection, run_id: str) -> RunStatus:
    """Return how the jobs of a run ended, and how each of them did before on this kind of device."""
    query = select(schema.run, schema.fingerprint.c.facts).join(schema.fingerprint).where(schema.run.c.id == run_id)
    run = connection.execute(query).first()
    if run is None:
        return run_status(connection, resolve_run(connection, run_id))
    kind = run.facts.get("device_kind", "")
    decided = _decided(connection, run_id)
    earlier = _earlier(connection, run_id, kind)
    run_job = schema.run_job.c
    planned = (
        select(run_job.id, schema.job.c.name, run_job.stale)
        .select_from(schema.run_job.join(schema.job))
        .where(run_job.run_id == run_id)
        .order_by(run_job.position)
    )
    rows: Any = connection.execute(planned).all()
    return RunStatus(
        run_id=run.id,
        command=run.command,
        user=run.user_name,
        priority=run.priority,
        device_kind=kind,
        started_ms=run.started_ms,
        finished_ms=run.finished_ms,
        exit_code=run.exit_code,
        jobs=tuple(_job(row, decided.get(row.id), earlier.get(row.id)) for row in rows),
    )


def _job(planned: Row[Any], decided: Row[Any] | None, earlier: Row[Any] | None) -> JobStatus:
    before = earlier and Before(earlier.run_id, earlier.recorded_ms, earlier.verdict, earlier.known_issue)
    if decided is None:
        stale = planned.stale or {}
        return JobStatus(planned.name, "", "", "", stale.get("reason", ""), stale=bool(stale), before=before or None)
    return JobStatus(
        planned.name, decided.verdict, decided.known_issue, decided.stage, decided.reason, before=before or None
    )


def _decided(connection: Connection, run_id: str) -> dict[int, Row[Any]]:
    """Return the attempt that decides each job, in the manner of `farm.results.attempt.final_attempt`."""
    attempt = schema.attempt.c
    query = (
        select(attempt.run_job_id, attempt.verdict, attempt.known_issue, attempt.stage, attempt.reason)
        .select_from(schema.attempt.join(schema.run_job))
        .where(schema.run_job.c.run_id == run_id)
        .order_by(attempt.id)
    )
    rows: Any = connection.execute(query).all()
    found: dict[int, Row[Any]] = {}
    for row in rows:
        last = found.get(row.run_job_id)
        if last is None or row.verdict != Verdict.INFRA or last.verdict == Verdict.INFRA:
            found[row.run_job_id] = row
    return found


def _earlier(connection: Connection, run_id: str, kind: str) -> dict[int, Row[Any]]:
    """Return the newest attempt with a verdict about the code before this run, by the id of the run's planned job."""
    attempt, run_job = schema.attempt.c, schema.run_job.c
    newest: Any = connection.execute(select(run_job.id, _newest_before(kind)).where(run_job.run_id == run_id))
    ids: dict[int, int] = {attempt_id: planned for planned, attempt_id in newest if attempt_id is not None}
    found: dict[int, Row[Any]] = {}
    # In statements of their own: PostgreSQL would rather read every attempt there is.
    for part in chunks(ids, FEW):
        query = (
            select(attempt.id, run_job.run_id, attempt.recorded_ms, attempt.verdict, attempt.known_issue)
            .select_from(schema.attempt.join(schema.run_job))
            .where(attempt.id.in_(part))
        )
        rows: Any = connection.execute(query)
        found |= {ids[row.id]: row for row in rows}
    return found


def _newest_before(kind: str) -> ScalarSelect[int]:
    # For each job on its own, along the index of its runs, whose ids sort by time: it ends with the first that has a
    # verdict.
    earlier, attempt, fingerprint = schema.run_job.alias(), schema.attempt.c, schema.fingerprint.c
    of_kind = select(fingerprint.hash).where(fingerprint.facts["device_kind"].as_string() == kind)
    return (
        select(attempt.id)
        .select_from(earlier.join(schema.run, schema.run.c.id == earlier.c.run_id).join(
            schema.attempt, attempt.run_job_id == earlier.c.id
        ))
        .where(
            earlier.c.job_id == schema.run_job.c.job_id,
            earlier.c.run_id < schema.run_job.c.run_id,
            attempt.verdict.in_(_ABOUT_THE_CODE),
            schema.run.c.fingerprint_hash.in_(of_kind),
            not_debugged(),
        )
        .order_by(earlier.c.run_id.desc(), attempt.id.desc())
        .limit(1)
        .correlate(schema.run_job)
        .scalar_subquery()
    )  # fmt: skip


class StatusReader:
    """How things stand. Every method is one transaction and raises StoreError when the database refuses."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def run_to_show(self) -> str | None:
        """Return the newest nightly run of the last eight days, or else the newest run; None where there is none.

        Runs of `farm debug` are left out.
        """
        with self._database.reading() as connection:
            return run_to_show(connection, now_ms())

    def of_run(self, run_id: str) -> RunStatus:
        """Return how the jobs of a run ended, and how each did before it, without numbers. Raises UnknownNameError."""
        with self._database.reading() as connection:
            return run_status(connection, run_id)

    def unfinished_runs(self) -> list[UnfinishedRun]:
        """Return the runs of the last day that have no end, newest first: they run, or were killed."""
        with self._database.reading() as connection:
            return unfinished(connection, now_ms())

    def job_results(self, job_ids: Collection[str], run_ids: Collection[str] | None = None) -> list[JobResult]:
        """Return the newest result of each job that has one, of `run_ids` alone where given.

        Runs of `farm debug` are left out.
        """
        from farm.store.queries import coverage

        with self._database.reading() as connection:
            return coverage.job_results(connection, job_ids, run_ids)
