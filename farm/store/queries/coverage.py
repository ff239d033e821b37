"""Newest results of jobs over all runs: a table of all jobs, and the results of a failed case on other targets.

Every step goes through an index, from a job to its newest row: a store may have thousands of runs of every job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from farm.results.attempt import Attempt, Verdict
from farm.store import schema, values
from farm.store.attempt_fields import ATTEMPT_FIELDS, attempt_of
from farm.store.details import comparisons_of
from farm.store.records import JobResult
from farm.store.statements import chunks, in_parts, statement, struct_of
from farm.store.view import CaseResult, JobView, RunView

MOST_JOBS = 200
"""Jobs of a run that are looked for elsewhere: failures first, then known issues."""

_BRIEF = select(*(column for column in schema.attempt.c if column.name in {"id", *ATTEMPT_FIELDS} - {"log"}))
"""Attempts without their logs, which are long."""


def with_elsewhere(connection: Connection, view: RunView) -> RunView:
    """Return the run with the results of its failed jobs' cases on other targets."""
    failed = [(job, job.decisive) for job in view.jobs]
    red = [(job, bool(one.known_issue)) for job, one in failed if one is not None and one.verdict is Verdict.FAILED]
    wanted = [job for job, _ in sorted(red, key=lambda found: found[1])[:MOST_JOBS]]
    if not wanted:
        return view
    near = {"socs": sorted({job.soc for job in wanted}), "precisions": sorted({job.precision for job in wanted})}
    results: dict[str, list[JobResult]] = {}
    for cases in chunks({job.case for job in wanted}):
        jobs = connection.scalars(statement("status.jobs_of_cases"), {"cases": cases, **near}).all()
        branch = view.toolchain.branch if view.toolchain else ""
        for found in newest_results(connection, jobs, None, branch, view.id):
            results.setdefault(found.case, []).append(found)
    there = {job.id: elsewhere(job, results.get(job.case, ())) for job in wanted}
    replace = msgspec.structs.replace
    return replace(view, jobs=tuple(replace(job, elsewhere=there.get(job.id, ())) for job in view.jobs))


def elsewhere(job: JobView, results: Iterable[JobResult]) -> tuple[CaseResult, ...]:
    """Return the `results` that put a failure of `job` into context: first other SoCs, then other precisions.

    Each differs from `job` in the SoC, or in backend and precision, never in both. If suites share the case, the result
    from the suite of `job` goes first, then the newest. Pure.
    """
    best: dict[tuple[str, str, str], JobResult] = {}
    own = (job.soc, job.backend, job.precision)
    for row in results:
        target = (row.result.soc, row.result.backend, row.result.precision)
        same = (row.case, row.module, row.options) == (job.case, job.case_module, job.options)
        # A case without a module is identified by its suite.
        same = same and bool(row.module or row.suite == job.suite)
        if not same or target == own or (target[0] != own[0] and target[1:] != own[1:]):
            continue
        there = best.get(target)
        if there is None or _rank(row, job) > _rank(there, job):
            best[target] = row
    ordered = sorted(best.items(), key=lambda item: (item[0][0] == job.soc, item[0]))
    return tuple(row.result for _, row in ordered)


def newest_results(
    connection: Connection,
    job_ids: Collection[int],
    run_ids: Collection[str] | None,
    branch: str,
    also: str = "",
    *,
    local_runs_of: str = "",
) -> list[JobResult]:
    """Return the newest results of jobs, by their row ids; none of `farm debug`.

    The results are of `run_ids`; with None of the runs of a branch, and of the run `also`. A job without any gets the
    result of a local run of the user `local_runs_of`.
    """
    of_runs: dict[str, Any] = (
        {"branch": branch, "run": also, "user": ""} if run_ids is None else {"runs": sorted(run_ids)}
    )
    if run_ids is not None and not run_ids:
        return []
    name = "status.newest_rows" if run_ids is None else "status.newest_rows_of_runs"
    rows: list[Any] = []
    for jobs in chunks(job_ids):
        found_rows = connection.execute(statement(name), {"jobs": jobs, **of_runs}).all()
        without = [row.id for row in found_rows if row.tried is None]
        rows += [row for row in found_rows if row.tried is not None]
        if run_ids is None and local_runs_of and without:
            of_local_runs = {**of_runs, "jobs": without, "user": values.clean(local_runs_of)}
            rows += [row for row in connection.execute(statement(name), of_local_runs) if row.tried is not None]
    newer = {row.tried: row.planned for row in rows if row.planned != row.tried}
    newer_rows = in_parts(connection, statement("status.runs_of_rows"), newer.values())
    newer_runs: dict[int, str] = {row.id: row.run_id for row in newer_rows}
    found: list[JobResult] = []
    for ids in chunks([row.tried for row in rows]):
        found += _results(connection, ids, {tried: newer_runs[planned] for tried, planned in newer.items()})
    return found


def _results(connection: Connection, run_job_ids: Collection[int], newer: dict[int, str]) -> list[JobResult]:
    """Return what decides of rows in `run_job` that have attempts; `newer` are newer runs of the jobs by row."""
    rows = connection.execute(statement("status.results"), {"ids": run_job_ids}).all()
    ids = [row.attempt_id for row in rows]
    brief = {row["id"]: row for row in connection.execute(_BRIEF.where(schema.attempt.c.id.in_(ids))).mappings()}
    comparisons = comparisons_of(connection.execute(statement("status.comparisons"), {"attempts": ids}))
    return [
        _job_result(
            row,
            attempt_of(brief[row.attempt_id], row.job_id, row.serial, comparisons=comparisons.get(row.attempt_id, ())),
            newer.get(row.run_job_id, ""),
        )
        for row in rows
        # Without it the run was pruned between the two statements.
        if row.attempt_id in brief
    ]


def _job_result(row: Row[Any], attempt: Attempt, newer_run: str) -> JobResult:
    return struct_of(JobResult, row, result=struct_of(CaseResult, row, attempt=attempt), newer_run=newer_run)


def _rank(row: JobResult, job: JobView) -> tuple[bool, int]:
    return row.suite == job.suite, row.result.time_ms
