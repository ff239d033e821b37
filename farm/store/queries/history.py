"""History of jobs, attempt by attempt and run by run: `store.history`."""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from farm.base.errors import FIRST_RUN, NoHistoryError, UnknownNameError, UsageError
from farm.base.socs import find_soc
from farm.store import values
from farm.store.details import device_facts, fingerprints
from farm.store.queries.runs import find_run
from farm.store.records import Background, HistoryPoint
from farm.store.statements import chunks, statement
from farm.store.toolchains import of_branch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sqlalchemy import Connection, Row

    from farm.results.analysis.flakiness import Record
    from farm.store.database import Database
    from farm.store.queries.points import JobPast

_NOTHING = f"(the store has no job yet: '{FIRST_RUN}' makes some)"
# `./my_suites/mine/conv`, as one may name a case whose suite is in no folder that farm looks in.
_NAMED_BY_PATH = re.compile(r"\A\.{0,2}/(?:[^\[]*/)?([^/\[]+/[^/]+)")
# Most ids in a statement, beyond any useful history.
_MOST_PARAMETERS = 10_000
# A failed attempt has a row in the history of every asked metric: metric, unit, direction, exact, value and n.
_UNMEASURED = ("", "", False, None, 0)


class HistoryReader:
    """Reader of jobs' histories, without runs of `farm debug`.

    Every method is one transaction and raises StoreError if the database refuses. A job pattern is a job's id,
    `suite/case`, a suite, or any of these with `*` and `?`; an unknown job, metric or SoC raises UnknownNameError with
    the nearest name.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def points(
        self,
        job_pattern: str,
        metric: str | None = None,
        soc: str | None = None,
        limit: int = 20,
        branch: str | None = "",
        *,
        local_runs_of: str = "",
    ) -> list[HistoryPoint]:
        """Return the numbers of jobs in a branch, grouped by job, device kind and metric, oldest first in each group.

        None as `metric` is every metric; as `branch` every run, also local ones. `limit` counts the newest attempts of
        a job on a device kind, and as many from local runs of the user `local_runs_of`.
        """
        with self._database.reading() as connection:
            jobs = list(matching_jobs(connection, job_pattern, soc))
            rows: list[Any] = []
            if jobs:
                of = {"jobs": jobs, "most": limit, "user": values.clean(local_runs_of), **of_branch(branch)}
                rows += connection.execute(statement("history.attempts"), of)
            measured: dict[int, list[tuple[Any, ...]]] = {}
            for attempts in chunks([row.attempt_id for row in rows]):
                for name in ("history.medians", "history.counts"):
                    for row in connection.execute(statement(name), {"attempts": attempts}):
                        value = values.level_of(row.metric, row.p50, row.samples)
                        figure = (row.metric, row.unit, row.direction, row.exact, value, row.n)
                        measured.setdefault(row.attempt_id, []).append(figure)
            if metric is not None:
                known = set(connection.scalars(statement("history.metrics"), {"jobs": jobs}))
                if metric not in known:
                    raise UnknownNameError(
                        "metric", metric, known, "" if known else "(these jobs never measured anything)"
                    )
        points = []
        for row in rows:
            figures = [one for one in measured.get(row.attempt_id, ()) if metric in (None, one[0])]
            points += [_point(row, *one) for one in figures or [(metric or "", *_UNMEASURED)]]
        return sorted(points, key=lambda point: (point.job_id, point.device_kind, point.metric))

    def job_names(self, job_pattern: str, soc: str | None = None) -> list[str]:
        """Return the ids of the jobs that a pattern means."""
        with self._database.reading() as connection:
            return sorted(matching_jobs(connection, job_pattern, soc).values())

    def socs(self, job_patterns: Iterable[str]) -> list[str]:
        """Return the names of the SoCs with jobs of the patterns, sorted."""
        found: set[str] = set()
        for pattern in job_patterns:
            with suppress(UnknownNameError):
                found.update(name.partition("[")[2].partition("-")[0] for name in self.job_names(pattern))
        return sorted(found)

    def newest_runs(self, job_pattern: str, *, debug: bool = False) -> dict[str, str]:
        """Return the newest run of any branch with an attempt of each job, by the job's id; the newest last.

        With `debug`, runs of `farm debug` count as well.
        """
        with self._database.reading() as connection:
            jobs = matching_jobs(connection, job_pattern)
            of = {"jobs": list(jobs), "debug": int(debug)}
            return {row.name: row.run_id for row in connection.execute(statement("history.newest_runs"), of)}

    def pasts_of_run(self, run_id: str) -> list[JobPast]:
        """Return the numbers of a run's judged jobs, in the run and earlier runs of its branch, by kind of device.

        A local run comes after the runs of the branch that it is compared with.
        Raises UnknownNameError.
        """
        from farm.store.queries.points import job_pasts

        with self._database.reading() as connection:
            run = find_run(connection, run_id)
            of_run = {"run": run.id}
            jobs = {row.id: row.name for row in connection.execute(statement("history.jobs_of_run"), of_run)}
            return list(job_pasts(connection, jobs, run.id, branch=run.run_branch))

    def pasts_of_jobs(
        self, job_pattern: str, soc: str | None = None, most: int = 60, branch: str = ""
    ) -> list[JobPast]:
        """Return the numbers of the newest `most` runs of jobs in a branch."""
        from farm.store.queries.points import job_pasts

        with self._database.reading() as connection:
            jobs = matching_jobs(connection, job_pattern, soc)
            return list(job_pasts(connection, jobs, None, branch=branch, most=most))

    def reliability(
        self, job_ids: Collection[str], kind: str, until: str = "", *, failed_of_late: bool = False, branch: str = ""
    ) -> dict[str, Record]:
        """Return the reliability of jobs in their last 40 runs of a branch on devices of a kind, up to run `until`.

        Reliability is the pass rate and flakiness.

        Jobs without a verdict on their code are left out; with `failed_of_late` also jobs without a failure in these
        runs.
        """
        from farm.store.queries.flakiness import reliability

        with self._database.reading() as connection:
            return reliability(connection, job_ids, kind, until, branch, failed_of_late=failed_of_late)

    def fingerprints(self, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the facts of fingerprints, name to value, by their hash."""
        with self._database.reading() as connection:
            return fingerprints(connection, hashes)

    def background(self, run_id: str, runs: int = 30) -> Background:
        """Return the numbers of a run's jobs in the newest `runs` of its branch up to it, and its files.

        Numbers are of its kind of device. The answer is empty for a missing run.
        """
        from farm.store.queries.trends import background

        with self._database.reading() as connection:
            return background(connection, run_id, runs)


def matching_jobs(
    connection: Connection, pattern: str, soc: str | None = None, run_id: str | None = None
) -> dict[int, str]:
    """Return the jobs of `pattern`, id to name; with `run_id` only jobs of that run, possibly none."""
    pattern, soc = values.clean(_NAMED_BY_PATH.sub(r"\1", pattern)), soc and values.clean(soc)
    suite, _, case = pattern.partition("/")
    named = {"pattern": pattern, "suite": suite, "case_name": values.case_column(case)}
    # An exact name needs no search over all names.
    found: Any = connection.execute(statement("history.jobs_named"), named).all()
    if not found:
        rows: Any = connection.execute(statement("history.jobs")).all()
        expression = _expression(pattern)
        found = [row for row in rows if any(map(expression.fullmatch, _names(row)))]
    if not found:
        known = {name for row in rows for name in _names(row)[1:]} if "[" not in pattern else {r.name for r in rows}
        raise UnknownNameError("job", pattern, known, "" if known else _NOTHING)
    if soc is not None:
        of_soc = [row for row in found if row.soc.casefold() == soc.casefold()]
        if not of_soc:
            # An unknown SoC is refused by its name; a known one has no result here yet.
            name, there = find_soc(soc).name, ", ".join(sorted({row.soc for row in found}))
            raise NoHistoryError(f"{pattern} has no result on {name} yet: there are results on {there}")
        found = of_soc
    if run_id is not None:
        of_run = set(connection.scalars(statement("history.jobs_of_run"), {"run": run_id}))
        found = [row for row in found if row.id in of_run]
    if len(found) > _MOST_PARAMETERS:
        raise UsageError(f"{len(found)} jobs match {pattern!r}: name a suite or an SoC as well")
    return {row.id: row.name for row in found}


def _names(row: Any) -> tuple[str, str, str]:
    return row.name, f"{row.suite}/{values.case_of(row.name)}", row.suite


def _expression(pattern: str) -> re.Pattern[str]:
    # Brackets are part of a job's id. fnmatch's expressions are atomic: a pattern with many stars takes linear time.
    return re.compile(translate(pattern.replace("[", "[[]")), re.IGNORECASE)


def _point(
    row: Row[Any], metric: str, unit: str, direction: str, exact: bool, value: float | None, n: int
) -> HistoryPoint:
    return HistoryPoint(
        job_id=row.job_id,
        run_id=row.run_id,
        time_ms=row.time_ms,
        fingerprint=row.fingerprint_hash,
        case_version=row.case_version,
        device=row.device,
        device_kind=row.device_kind,
        verdict=row.verdict,
        known_issue=row.known_issue,
        metric=metric,
        unit=unit,
        direction=direction,
        exact=exact,
        value=value,
        n=n,
        device_facts=device_facts(row.build, row.runtime),
        local=row.run_private or UNSET,
        commit=row.run_commit or UNSET,
        dirty=row.run_dirty or UNSET,
    )
