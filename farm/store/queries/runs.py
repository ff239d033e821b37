"""Runs, their jobs and attempts: `store.runs`; and the newest results of jobs over all runs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from farm.base.errors import FIRST_RUN, UnknownNameError, UsageError
from farm.results.attempt import Attempt, Comparison, Direction, LayerComparison, Measurement, Verdict
from farm.store import schema, values
from farm.store.attempt_fields import ATTEMPT_FIELDS, attempt_of
from farm.store.postgresql import user_of
from farm.store.records import (
    CaseResult,
    DeviceView,
    JobFile,
    JobResult,
    JobView,
    LastVerdict,
    ListedJob,
    Purpose,
    RunView,
)
from farm.store.rows import details_of, operators_of, verdict_of
from farm.store.statements import Group, chunks, in_parts, statement, struct_of

# Newest results of jobs over all runs: a table of all jobs, and the results of a failed case on other targets.
#
# Every step goes through an index, from a job to its newest row: a store may have thousands of runs of every job.


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
    for row in sorted(results, key=lambda row: (row.suite == job.suite, row.result.time_ms), reverse=True):
        target = (row.result.soc, row.result.backend, row.result.precision)
        same = (row.case, row.module, row.options) == (job.case, job.case_module, job.options)
        # A case without a module is identified by its suite.
        same = same and bool(row.module or row.suite == job.suite)
        if same and target != own and (target[0] == own[0] or target[1:] == own[1:]):
            best.setdefault(target, row)
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
    comparisons = details_of(Comparison, connection.execute(statement("status.comparisons"), {"attempts": ids}))

    def brief_attempt(row: Row[Any]) -> Attempt:
        figures = tuple(comparisons.get(row.attempt_id, ()))
        return attempt_of(brief[row.attempt_id], row.job_id, row.serial, comparisons=figures)

    return [
        struct_of(
            JobResult,
            row,
            result=struct_of(CaseResult, row, attempt=brief_attempt(row)),
            newer_run=newer.get(row.run_job_id, ""),
        )
        for row in rows
        # Without it the run was pruned between the two statements.
        if row.attempt_id in brief
    ]


# Runs, their jobs and attempts: `store.runs`.


_ANY: dict[str, Any] = {**values.of_branch(None), "user": "", "priority": "", "name": "", "unbegun": 0}
_LATEST = re.compile(r"latest(?:~(\d{1,9}))?(?:@(.+))?")


class RunReader(Group):
    """Every method is one transaction and raises StoreError when the database refuses."""

    def latest_id(self) -> str | None:
        """Return the id of the run that began last, None when there is none."""
        newest: str | None = self._value("runs.back", **{**_ANY, "back": 0, "unbegun": 1})
        return newest

    def resolve(self, ref: str, *, own: bool = True, unbegun: bool = False, unbegun_named: bool = False) -> str:
        """Return the run id of `latest`, `latest~1` (the one before), an id, its unique beginning or a name.

        `latest` is the newest run of this user, or of all users if `own` is False; `latest@nightly` is the newest
        nightly run, `latest@main` the newest of the branch `main`. A name of several runs means the newest. Runs that
        never began count with `unbegun`, and with `unbegun_named` if they are named. Raises UnknownNameError with the
        nearest id or name, UsageError for an ambiguous beginning or a too distant run.
        """
        user = self._database.user if own else ""
        with self._database.reading() as connection:
            return resolve_run(connection, ref, user, unbegun=unbegun, unbegun_named=unbegun_named)

    def newest_called(self, name: str) -> str | None:
        """Return the id of this user's newest run of a name, None when there is none."""
        if not name:
            return None
        named = {"name": values.clean(name, values.NAME_LIMIT), "user": values.clean(self._database.user)}
        newest: str | None = self._value("runs.back", **{**_ANY, **named, "back": 0, "unbegun": 1})
        return newest

    def branch(self, run_id: str) -> tuple[str, bool]:
        """Return the branch that a run belongs to or, where the second is True, that it is only compared with.

        Raises UnknownNameError.
        """
        with self._database.reading() as connection:
            run = find_run(connection, run_id)
            return run.run_branch, run.run_private

    def view(self, run_id: str) -> RunView:
        """Return all that is known of a run, and what its failed cases did elsewhere. Raises UnknownNameError."""
        with self._database.reading() as connection:
            return with_elsewhere(connection, _run_view(connection, run_id))

    def view_of_job(self, run_id: str, job_id: str) -> RunView:
        """Return a run with a single job, and the attempts of this job on other devices. Raises UnknownNameError."""
        with self._database.reading() as connection:
            job = connection.scalar(statement("jobs.row"), {"name": job_id})
            view = _run_view(connection, run_id, job or -1)
            if not view.jobs:
                raise UnknownNameError("job", job_id, (), f"(run {view.id} has no such job)")
            return with_elsewhere(connection, view)

    def artifacts(self, run_id: str, job_id: str | None = None) -> list[JobFile]:
        """Return the artifacts of a run, or of a job in it, oldest first."""
        with self._database.reading() as connection:
            job = 0 if job_id is None else connection.scalar(statement("jobs.row"), {"name": job_id}) or -1
            found = connection.execute(statement("runs.artifacts"), {"run": run_id, "job": job})
            return [struct_of(JobFile, row) for row in found]

    def planned_jobs(self, run_ids: Iterable[str], soc: str, backend: str) -> list[ListedJob]:
        """Return the jobs for a SoC and backend that runs were to do, in the order of the first run."""
        planned: dict[str, ListedJob] = {}
        with self._database.reading() as connection:
            for run_id in run_ids:
                of = {"run": run_id, "soc": soc, "backend": backend}
                for row in connection.execute(statement("runs.planned"), of):
                    planned.setdefault(row.name, ListedJob(*row))
        return list(planned.values())

    def verdicts(self, run_id: str) -> dict[str, LastVerdict]:
        """Return the verdicts of a run's jobs by their ids, without jobs that have no verdict on their code."""
        return {row.name: verdict_of(row) for row in self._rows("runs.verdicts", run=run_id)}


def resolve_run(
    connection: Connection, ref: str, user: str, *, unbegun: bool = False, unbegun_named: bool = False
) -> str:
    """Return the run id that `ref` means to a user; "" for any user. `RunReader.resolve` has the errors."""
    ref = values.clean(ref, values.NAME_LIMIT)
    match = _LATEST.fullmatch(ref)
    if match:
        return _back(connection, ref, int(match[1] or 0), _latest_of(connection, match[2], user), unbegun)
    pattern = re.sub(r"[/%_]", r"/\g<0>", ref) + "%"
    begin_so: list[str] = list(connection.scalars(statement("runs.like"), {"pattern": pattern, "most": 9}))
    if ref in begin_so:
        return ref
    if len(begin_so) == 1:
        return begin_so[0]
    called = {"back": 0, **_ANY, "name": ref, "unbegun": int(unbegun or unbegun_named)}
    named: str | None = connection.scalar(statement("runs.back"), called) if ref else None
    if named is not None:
        return named
    if begin_so and ref:
        shown = ", ".join(begin_so[:8]) + (", ..." if len(begin_so) > 8 else "")
        raise UsageError(f"several runs begin with {ref!r}: {shown}")
    known = list(connection.scalars(statement("runs.newest"), {"most": 1000}))
    names = connection.scalars(statement("runs.names"), {"most": 1000})
    hint = "" if known else f"(the store has none: '{FIRST_RUN}' makes one)"
    raise UnknownNameError("run", ref, [*known, *names], hint, shown=known)


def find_branch(connection: Connection, name: str) -> str:
    """Return the branch of a name; `default` is the one without a name, unless one is called so.

    Raises UnknownNameError.
    """
    known = set(connection.scalars(statement("status.branches")))
    if name in known:
        return name
    if name == values.DEFAULT_BRANCH:
        return ""
    raise UnknownNameError(
        "branch", name, map(values.branch_text, known), "" if known else "(the store has no run yet)"
    )


def _latest_of(connection: Connection, name: str | None, user: str) -> tuple[str, dict[str, Any]]:
    """Return whose runs `latest@NAME` is about, in words and as parameters; `latest` alone where it is None.

    Raises UnknownNameError.
    """
    if name is None:
        return f"{user or 'the store'} has", {**_ANY, "user": values.clean(user)}
    if name == Purpose.NIGHTLY and name not in connection.scalars(statement("status.branches")).all():
        return "of nightly runs the store has", {**_ANY, "priority": Purpose.NIGHTLY}
    branch = find_branch(connection, name)
    return f"branch {values.branch_text(branch)} has", {**_ANY, **values.of_branch(branch)}


def _back(connection: Connection, ref: str, steps: int, whose: tuple[str, dict[str, Any]], unbegun: bool) -> str:
    who, of = whose
    of = {**of, "unbegun": int(unbegun)}
    found: str | None = connection.scalar(statement("runs.back"), {"back": steps, **of})
    if found is not None:
        return found
    count = connection.scalar(statement("runs.count"), of)
    if count:
        raise UsageError(f"{ref}: {who} {count} run{'' if count == 1 else 's'}")
    others = connection.scalar(statement("runs.count"), _ANY)
    hint = f"; 'farm runs list' lists {others} of others" if others and ref.partition("@")[0] == ref else ""
    raise UsageError(f"{ref}: {who} no run yet: '{FIRST_RUN}' makes one{hint}")


def find_run(connection: Connection, run_id: str) -> Row[Any]:
    """Return the row of a run with the facts of its fingerprint, by its id or what else means it."""
    run = connection.execute(statement("runs.run"), {"run": run_id}).first()
    return find_run(connection, resolve_run(connection, run_id, user_of(connection))) if run is None else run


def _run_view(connection: Connection, run_id: str, job: int = 0) -> RunView:
    run = find_run(connection, run_id)
    # Before the attempts: each statement on PostgreSQL sees newer rows than the one before, and the deciding attempt
    # of a job has to be among the attempts.
    jobs = jobs_of(connection, run.id, job)
    attempts = attempts_of(connection, run.id, job)
    return struct_of(
        RunView,
        run,
        **values.run_facts(run),
        fingerprint=run.facts,
        devices=tuple(_device_view(row, attempts) for row in devices_of(connection, run.id)),
        jobs=_job_views(jobs, attempts),
    )


def devices_of(connection: Connection, run_id: str) -> Sequence[Row[Any]]:
    """Return the devices that had a part in a run, in an order that is the same in every store."""
    found = connection.execute(statement("runs.devices"), {"run": run_id})
    # Not by the database: two have two orders of text.
    return sorted(found, key=lambda row: (row.serial, row.soc, row.kind, row.build))


def _device_view(row: Row[Any], attempts: Sequence[tuple[Row[Any], Attempt]]) -> DeviceView:
    used = [(one.run_job_id, one.seconds) for one, _ in attempts if one.device_id == row.id]
    jobs = len({run_job_id for run_job_id, _ in used})
    # fsum makes the sum independent of the order of rows, which differs between stores.
    busy_seconds = math.fsum(seconds for _, seconds in used)
    return struct_of(DeviceView, row, jobs=jobs, busy_seconds=busy_seconds, runtime=row.runtime or {})


def _job_views(jobs: Iterable[Row[Any]], attempts: Iterable[tuple[Row[Any], Attempt]]) -> tuple[JobView, ...]:
    of_job: dict[int, list[Attempt]] = {}
    numbers: dict[int, int] = {}
    for row, attempt in attempts:
        of_job.setdefault(row.run_job_id, []).append(attempt)
        numbers[row.id] = len(of_job[row.run_job_id])
    return tuple(
        struct_of(
            JobView,
            row,
            id=row.name,
            case=values.case_of(row.name),
            attempts=tuple(of_job.get(row.id, ())),
            build_seconds=row.build_seconds or 0.0,
            cached=bool(row.cached),
            fallback_ops=row.fallback_ops or {},
            case_module=row.module,
            case_version=row.version,
            program=row.program_hash or msgspec.UNSET,
            decisive_attempt=numbers.get(row.decisive_attempt_id, 0),
        )
        for row in jobs
    )


def jobs_of(connection: Connection, run_id: str, job: int = 0) -> Sequence[Row[Any]]:
    """Return the planned jobs of a run, in their order, or the one with the row id `job`."""
    return connection.execute(statement("runs.jobs"), {"run": run_id, "job": job}).all()


def attempts_of(connection: Connection, run_id: str, job: int = 0) -> list[tuple[Row[Any], Attempt]]:
    """Return the attempts of a run, or of the job with the row id `job` in it, with their rows, oldest first."""
    of_run = {"run": run_id, "job": job}
    # Attempts are read first: rows recorded meanwhile give details without an attempt, never the other way round.
    rows = connection.execute(statement("runs.attempts"), of_run).all()
    comparisons = details_of(Comparison, connection.execute(statement("runs.comparisons"), of_run))
    operators = operators_of(connection.execute(statement("runs.operators"), of_run))
    layers = details_of(LayerComparison, connection.execute(statement("runs.layers"), of_run))
    measurements = _measurements(connection, of_run)
    return [
        (
            row,
            attempt_of(
                row._mapping,  # noqa: SLF001 - public in SQLAlchemy
                row.job_id,
                row.serial,
                comparisons=tuple(comparisons.get(row.id, ())),
                measurements=tuple(one for _, one in sorted(measurements.get(row.id, {}).items())),
                operators=tuple(operators.get(row.id, ())),
                layers=tuple(layers.get(row.id, ())),
            ),
        )
        for row in rows
    ]


def _measurements(connection: Connection, of_run: dict[str, Any]) -> dict[int, dict[int, Measurement]]:
    """Return measurements by attempt id and position."""
    found: dict[int, dict[int, Measurement]] = {}
    for name, unpack in (("measurements", values.unpack_floats), ("counters", values.unpack_integers)):
        for row in connection.execute(statement(f"runs.{name}"), of_run):
            found.setdefault(row.attempt_id, {})[row.position] = Measurement(
                row.metric, row.unit, Direction(row.direction), unpack(row.samples), exact=row.exact
            )
    return found
