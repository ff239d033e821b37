"""Which verdicts jobs had of late, and whether their code was the same; `Store.reliability` says what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from farm.analysis.flakiness import LOOKED_AT, Record, Try, record_of
from farm.results.attempt import Verdict
from farm.store import schema
from farm.store.queries.history import not_debugged
from farm.store.rows import FEW, chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect

_ABOUT_THE_CODE = (Verdict.PASSED, Verdict.FAILED)
# After every id of a run.
_NO_END = "~"


def reliability(
    connection: Connection, job_names: Collection[str], kind: str, until: str, *, failed_of_late: bool
) -> dict[str, Record]:
    """Return how jobs did in their last runs on a kind of device, by job id."""
    job = schema.job.c
    until = until or _NO_END
    found: dict[str, Record] = {}
    for part in chunks(job_names):
        since = func.coalesce(_since(kind, until), "")
        query = select(job.id, job.name, since.label("since")).where(job.name.in_(part))
        if failed_of_late:
            query = query.where(_a_failure(kind, until).is_not(None))
        jobs: Sequence[Any] = connection.execute(query).all()
        tries = _tries(connection, {row.id: row.since for row in jobs}, kind, until)
        found |= {row.name: record_of(tries[row.id]) for row in jobs if row.id in tries}
    return found


def _tries(connection: Connection, since: Mapping[int, str], kind: str, until: str) -> dict[int, list[Try]]:
    """Return the verdicts of jobs, each since a run of its own, oldest first."""
    if not since:
        return {}
    run_job, attempt = schema.run_job.c, schema.attempt.c
    planned = (
        select(run_job.id, run_job.job_id, run_job.run_id, run_job.judged_by, schema.run.c.fingerprint_hash)
        .select_from(schema.run_job.join(schema.run))
        .where(run_job.job_id.in_(since), run_job.run_id.between(min(since.values()), until), *_conditions(kind))
    )
    rows = {row.id: row for row in connection.execute(planned) if row.run_id >= since[row.job_id]}
    verdicts: list[Row[Any]] = []
    # In statements of their own: PostgreSQL would rather read every attempt there is.
    for part in chunks(rows, FEW):
        query = select(attempt.run_job_id, attempt.id, attempt.verdict, attempt.bundle_key)
        conditions = attempt.run_job_id.in_(part), attempt.verdict.in_(_ABOUT_THE_CODE)
        verdicts += connection.execute(query.where(*conditions))
    found: dict[int, list[Try]] = {}
    for one in sorted(verdicts, key=lambda one: (rows[one.run_job_id].run_id, one.id)):
        row = rows[one.run_job_id]
        # What a verdict depends on apart from the device: the same of all three is the same code.
        code = f"{one.bundle_key} {row.fingerprint_hash} {row.judged_by}" if one.bundle_key else ""
        found.setdefault(row.job_id, []).append(Try(row.run_id, code, one.verdict == Verdict.PASSED))
    return found


def _a_failure(kind: str, until: str) -> ScalarSelect[int]:
    """Return the query for any failed attempt of a row of `job` in its last runs."""
    run_job, attempt = schema.run_job.c, schema.attempt.c
    return (
        select(attempt.id)
        .select_from(schema.run_job.join(schema.attempt))
        .where(
            run_job.job_id == schema.job.c.id,
            run_job.run_id.between(func.coalesce(_since(kind, until), ""), until),
            attempt.verdict == Verdict.FAILED,
        )
        .limit(1)
        .correlate(schema.job)
        .scalar_subquery()
    )


def _since(kind: str, until: str) -> ScalarSelect[str]:
    """Return the query for the oldest of the last runs of a row of `job`, along the index of its runs."""
    earlier = schema.run_job.alias()
    return (
        select(earlier.c.run_id)
        .select_from(earlier.join(schema.run, schema.run.c.id == earlier.c.run_id))
        .where(earlier.c.job_id == schema.job.c.id, earlier.c.run_id <= until, *_conditions(kind))
        .order_by(earlier.c.run_id.desc())
        .offset(LOOKED_AT - 1)
        .limit(1)
        .correlate(schema.job)
        .scalar_subquery()
    )


def _conditions(kind: str) -> tuple[ColumnElement[bool], ...]:
    fingerprint = schema.fingerprint.c
    of_kind = select(fingerprint.hash).where(fingerprint.facts["device_kind"].as_string() == kind)
    return schema.run.c.fingerprint_hash.in_(of_kind), not_debugged()
