"""The newest results of jobs, whichever run they are of: a table of all of them, and what a red cell is worth.

Every step goes through an index, from a job to its newest row: a store may have thousands of runs of every job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import and_, exists, func, or_, select

from farm.results.attempt import Verdict, final_attempt
from farm.store import schema
from farm.store.queries.runs import attempt_of, comparison_of
from farm.store.records import JobResult, ListedJob
from farm.store.rows import chunks
from farm.store.view import CaseResult, JobView, RunView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect

    from farm.results.attempt import Attempt, Comparison

MOST_JOBS = 200
"""Jobs of a run that are looked for elsewhere: failures first, then known issues."""

# Of an attempt all but what is long.
_JOB = ("suite", "case_name", "soc", "backend", "precision", "options")
_ATTEMPT = ("verdict", "stage", "reason", "started_ms", "seconds", "bundle_key", "known_issue", "notes", "cause")


def job_results(
    connection: Connection, job_ids: Collection[str], run_ids: Collection[str] | None = None
) -> list[JobResult]:
    """Return the newest result of each job that has one, of `run_ids` alone where given; none of `farm debug`."""
    found: list[JobResult] = []
    for part in chunks(job_ids):
        found += _newest(connection, schema.job.c.name.in_(part), run_ids)
    return found


def planned_jobs(connection: Connection, run_ids: Iterable[str], soc: str, backend: str) -> list[ListedJob]:
    """Return the jobs for a SoC and backend that runs were to do, in the order of the first run."""
    job, run_job = schema.job.c, schema.run_job.c
    found: dict[str, ListedJob] = {}
    for run_id in run_ids:
        query = (
            select(job.name, schema.suite_case.c.module, job.case_name, job.precision)
            .select_from(schema.run_job.join(schema.job).join(schema.suite_case))
            .where(run_job.run_id == run_id, job.soc == soc, job.backend == backend)
            .order_by(run_job.position, run_job.id)
        )
        for row in connection.execute(query):
            found.setdefault(row.name, ListedJob(*row))
    return list(found.values())


def with_elsewhere(connection: Connection, view: RunView) -> RunView:
    """Return the run with what the cases of its failed jobs did elsewhere."""
    failed = [job for job in view.jobs if _is_red(job)]
    wanted = sorted(failed, key=lambda job: bool(_known_issue(job)))[:MOST_JOBS]
    if not wanted:
        return view
    near = or_(
        schema.job.c.soc.in_({job.soc for job in wanted}), schema.job.c.precision.in_({job.precision for job in wanted})
    )
    results: dict[str, list[JobResult]] = {}
    for part in chunks({job.case for job in wanted}):
        for row in _newest(connection, and_(schema.job.c.case_name.in_(part), near), None):
            results.setdefault(row.case, []).append(row)
    found = {job.id: elsewhere(job, results.get(job.case, ())) for job in wanted}
    replace = msgspec.structs.replace
    return replace(view, jobs=tuple(replace(job, elsewhere=found.get(job.id, ())) for job in view.jobs))


def elsewhere(job: JobView, results: Iterable[JobResult]) -> tuple[CaseResult, ...]:
    """Return those of `results` that say what a failure of `job` is worth: first other SoCs, then other precisions.

    One differs from `job` in the SoC, or in backend and precision, never in both. Where suites share the case, the
    result of the suite of `job` goes before, then the newest. Pure.
    """
    best: dict[tuple[str, str, str], JobResult] = {}
    own = (job.soc, job.backend, job.precision)
    for row in results:
        target = (row.result.soc, row.result.backend, row.result.precision)
        same = (row.case, row.module, row.options) == (job.case, job.case_module, job.options)
        # Where no module tells what the case is, only its suite does.
        same = same and bool(row.module or row.suite == job.suite)
        if not same or target == own or (target[0] != own[0] and target[1:] != own[1:]):
            continue
        there = best.get(target)
        if there is None or _rank(row, job) > _rank(there, job):
            best[target] = row
    ordered = sorted(best.items(), key=lambda item: (item[0][0] == job.soc, item[0]))
    return tuple(row.result for _, row in ordered)


def _newest_row(debugged: Collection[str], run_ids: Collection[str] | None, *, tried: bool) -> ScalarSelect[Any]:
    """Return the id of the newest row in `run_job` of a job, of those with an attempt where `tried`."""
    row = schema.run_job.alias()
    query = select(row.c.id).where(row.c.job_id == schema.job.c.id)
    if debugged:
        run = schema.run.alias()
        query = query.where(exists().where(run.c.id == row.c.run_id, run.c.fingerprint_hash.not_in(debugged)))
    if tried:
        attempt = schema.attempt.alias()
        query = query.where(exists().where(attempt.c.run_job_id == row.c.id))
    if run_ids is not None:
        query = query.where(row.c.run_id.in_(run_ids))
    # Not by row: an imported run may be older than those before it.
    return query.order_by(row.c.run_id.desc()).limit(1).correlate(schema.job).scalar_subquery()


def _newest(connection: Connection, which: ColumnElement[bool], run_ids: Collection[str] | None) -> list[JobResult]:
    """Return the newest results of the jobs for which `which` holds."""
    # Asked for beforehand: a database that has to guess how many runs are left goes over all rows of a job.
    fingerprint = schema.fingerprint.c
    debugged = list(
        connection.scalars(select(fingerprint.hash).where(fingerprint.facts["debug"].as_string().is_not(None)))
    )
    query = (
        select(
            schema.job.c.id,
            _newest_row(debugged, run_ids, tried=True).label("tried"),
            _newest_row(debugged, run_ids, tried=False).label("planned"),
        )
        .where(which)
        .order_by(schema.job.c.id)
    )
    rows = [row for row in connection.execute(query) if row.tried is not None]
    newer = {row.tried: row.planned for row in rows if row.planned != row.tried}
    newer_runs: dict[int, str] = {}
    for part in chunks(list(newer.values())):
        planned = select(schema.run_job.c.id, schema.run_job.c.run_id).where(schema.run_job.c.id.in_(part))
        newer_runs |= {row.id: row.run_id for row in connection.execute(planned)}
    found: dict[int, JobResult] = {}
    for part in chunks([row.tried for row in rows]):
        found |= _results(connection, part)
    return [
        msgspec.structs.replace(result, newer_run=newer_runs.get(newer.get(run_job_id, 0), ""))
        for run_job_id, result in found.items()
    ]


def _results(connection: Connection, run_job_ids: Collection[int]) -> dict[int, JobResult]:
    """Return what decides of rows in `run_job` that have attempts, by their id."""
    attempt, run_job, job, run = schema.attempt.c, schema.run_job.c, schema.job.c, schema.run.c
    query = (
        select(
            *(attempt[name] for name in _ATTEMPT),
            *(job[name] for name in _JOB),
            attempt.id.label("attempt_id"),
            attempt.run_job_id,
            job.name.label("job_id"),
            run_job.operators,
            run.id.label("run_id"),
            run.started_ms.label("run_started_ms"),
            run.fingerprint_hash,
            schema.suite_case.c.version,
            schema.suite_case.c.module,
            schema.device.c.serial,
            func.coalesce(schema.device.c.kind, "").label("kind"),
        )
        .select_from(
            schema.attempt.join(schema.run_job)
            .join(schema.run)
            .join(schema.job, job.id == run_job.job_id)
            .join(schema.suite_case, schema.suite_case.c.id == run_job.case_id)
            .outerjoin(schema.device, schema.device.c.id == attempt.device_id)
        )
        .where(attempt.run_job_id.in_(run_job_ids))
        .order_by(attempt.id)
    )
    rows: dict[int, list[Any]] = {}
    for row in connection.execute(query):
        rows.setdefault(row.run_job_id, []).append(row)
    decisive = {run_job_id: _decisive(of_job) for run_job_id, of_job in rows.items()}
    comparisons = _comparisons(connection, [row.attempt_id for row, _ in decisive.values()])
    return {
        run_job_id: _job_result(row, msgspec.structs.replace(found, comparisons=comparisons.get(row.attempt_id, ())))
        for run_job_id, (row, found) in decisive.items()
    }


def _decisive(rows: Sequence[Row[Any]]) -> tuple[Row[Any], Attempt]:
    attempts = [attempt_of(row, _ATTEMPT) for row in rows]
    place = next(n for n, attempt in enumerate(attempts) if attempt is final_attempt(attempts))
    return rows[place], attempts[place]


def _comparisons(connection: Connection, attempt_ids: Collection[int]) -> dict[int, tuple[Comparison, ...]]:
    found: dict[int, tuple[Comparison, ...]] = {}
    comparison = schema.comparison.c
    query = (
        select(schema.comparison)
        .where(comparison.attempt_id.in_(attempt_ids))
        .order_by(comparison.attempt_id, comparison.position)
    )
    for row in connection.execute(query):
        found[row.attempt_id] = (*found.get(row.attempt_id, ()), comparison_of(row))
    return found


def _job_result(row: Row[Any], attempt: Attempt) -> JobResult:
    return JobResult(
        suite=row.suite,
        case=row.case_name,
        module=row.module,
        options=row.options,
        result=CaseResult(
            job_id=row.job_id,
            soc=row.soc,
            backend=row.backend,
            precision=row.precision,
            run_id=row.run_id,
            run_started_ms=row.run_started_ms,
            kind=row.kind,
            attempt=attempt,
            case_version=row.version,
        ),
        fingerprint=row.fingerprint_hash,
        operators=row.operators,
    )


def _rank(row: JobResult, job: JobView) -> tuple[bool, int]:
    return row.suite == job.suite, row.result.time_ms


def _is_red(job: JobView) -> bool:
    decides = final_attempt(job.attempts)
    return decides is not None and decides.verdict is Verdict.FAILED


def _known_issue(job: JobView) -> str:
    decides = final_attempt(job.attempts)
    return decides.known_issue if decides else ""
