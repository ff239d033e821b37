"""History of jobs, attempt by attempt and run by run: `store.history`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import translate
from itertools import groupby
from typing import Any

import msgspec
from msgspec import UNSET
from sqlalchemy import Connection, Row

from farm.base.errors import FIRST_RUN, NoHistoryError, UnknownNameError, UsageError
from farm.base.grouping import grouped
from farm.base.socs import find_soc
from farm.results.analysis.history import LOOKED_AT, Point, Record, Try, record_of
from farm.results.analysis.statistics import Series
from farm.results.attempt import Direction, OperatorProfile, Verdict
from farm.store import values
from farm.store.queries.runs import find_run
from farm.store.records import ArtifactRecord, Background, HistoryPoint, JobFile, ProfileRecord, TrendPoint, TrendSeries
from farm.store.rows import device_facts, fingerprints, operators_of
from farm.store.statements import FEW, Group, chunks, in_parts, statement, struct_of
from farm.suites.figures import figure_of

_NOTHING = f"(the store has no job yet: '{FIRST_RUN}' makes some)"
# `./my_suites/mine/conv`, as one may name a case whose suite is in no folder that farm looks in.
_NAMED_BY_PATH = re.compile(r"\A\.{0,2}/(?:[^\[]*/)?([^/\[]+/[^/]+)")
# Most ids in a statement, beyond any useful history.
_MOST_PARAMETERS = 10_000
_FIGURE = ("metric", "unit", "direction", "exact", "n")
# Fields of a point without the metric.
_UNMEASURED = {"unit": "", "direction": "", "exact": False, "value": None, "n": 0}

# Newest runs of a job: a baseline of 21, and as many of other toolchains, devices and people in between.
_RUNS = 60

# So many that their runs are looked for along an index by PostgreSQL as well, and take some megabytes.
_JOBS = 50
# Metrics whose trends a report shows.
_TRENDS = ("latency", "htp_cycles", "sqnr_fp32[0]")
# Attempts whose profiles are read by one statement: each of them may have thousands of rows.
_PROFILES = 500
# After every id of a run.
_NO_END = "~"


class SeriesPast(msgspec.Struct, frozen=True):
    """Metric of a job over its runs."""

    id: int
    """Id of the series' row in the store."""
    series: Series
    values: tuple[float, ...]
    """For each of the job's runs the median of its samples, of a figure of outputs what decides; NaN without one."""


class JobPast(msgspec.Struct, frozen=True):
    """A job on one kind of device, run by run."""

    job_id: str
    runs: tuple[Point, ...]
    """Runs, oldest first."""
    series: tuple[SeriesPast, ...]


class HistoryReader(Group):
    """Reader of jobs' histories, without runs of `farm debug`.

    Every method is one transaction and raises StoreError if the database refuses. A job pattern is a job's id,
    `suite/case`, a suite, or any of these with `*` and `?`; an unknown job, metric or SoC raises UnknownNameError with
    the nearest name.
    """

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
                of = {"jobs": jobs, "most": limit, "user": values.clean(local_runs_of), **values.of_branch(branch)}
                rows += connection.execute(statement("history.attempts"), of)
            measured: dict[int, list[dict[str, Any]]] = {}
            for name in ("history.medians", "history.counts"):
                for row in in_parts(connection, statement(name), [row.attempt_id for row in rows]):
                    value = values.level_of(row.metric, row.p50, row.samples)
                    figure = {field: getattr(row, field) for field in _FIGURE}
                    measured.setdefault(row.attempt_id, []).append({**figure, "value": value})
            if metric is not None:
                known = set(connection.scalars(statement("history.metrics"), {"jobs": jobs}))
                if metric not in known:
                    raise UnknownNameError(
                        "metric", metric, known, "" if known else "(these jobs never measured anything)"
                    )
        points = []
        for row in rows:
            point = struct_of(
                HistoryPoint,
                row,
                metric=metric or "",
                **_UNMEASURED,
                device_facts=device_facts(row.build, row.runtime),
                local=row.run_private or UNSET,
                commit=row.run_commit or UNSET,
                dirty=row.run_dirty or UNSET,
            )
            figures = [one for one in measured.get(row.attempt_id, ()) if metric in (None, one["metric"])]
            points += [msgspec.structs.replace(point, **one) for one in figures] or [point]
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
        with self._database.reading() as connection:
            run = find_run(connection, run_id)
            of_run = {"run": run.id}
            jobs = {row.id: row.name for row in connection.execute(statement("history.jobs_of_run"), of_run)}
            return list(_job_pasts(connection, jobs, run.id, branch=run.run_branch))

    def pasts_of_jobs(self, job_pattern: str, soc: str | None = None, branch: str = "") -> list[JobPast]:
        """Return the numbers of the newest 60 runs of jobs in a branch."""
        with self._database.reading() as connection:
            jobs = matching_jobs(connection, job_pattern, soc)
            return list(_job_pasts(connection, jobs, None, branch=branch))

    def reliability(
        self, job_ids: Collection[str], kind: str, until: str = "", *, failed_of_late: bool = False, branch: str = ""
    ) -> dict[str, Record]:
        """Return the reliability of jobs in their last 40 runs of a branch on devices of a kind, up to run `until`.

        Reliability is the pass rate and flakiness.

        Jobs without a verdict on their code are left out; with `failed_of_late` also jobs without a failure in these
        runs.
        """
        looked_at = statement("history.failed_since" if failed_of_late else "history.since")
        until = until or _NO_END
        found: dict[str, Record] = {}
        with self._database.reading() as connection:
            for names in chunks(job_ids):
                of = {"names": names, "kind": kind, "until": until, "branch": branch, "older": LOOKED_AT - 1}
                jobs = connection.execute(looked_at, of).all()
                tries = _tries(connection, {row.id: row.since for row in jobs}, kind, until, branch)
                found |= {row.name: record_of(tries[row.id]) for row in jobs if row.id in tries}
        return found

    def profiles(self, job_pattern: str, run_id: str | None = None) -> list[ProfileRecord]:
        """Return the newest profile of each job that a pattern means, of `run_id` where given.

        Raises UsageError where none has a profile.
        """
        operators: dict[int, list[OperatorProfile]] = {}
        files: dict[int, list[ArtifactRecord]] = {}
        with self._database.reading() as connection:
            jobs = matching_jobs(connection, job_pattern, run_id=run_id)
            of = {"jobs": list(jobs), "run": run_id or ""}
            found = connection.execute(statement("profiles.newest"), of).all() if jobs else []
            for attempts in chunks([row.attempt_id for row in found], _PROFILES):
                of_attempts = {"attempts": attempts}
                operators |= operators_of(connection.execute(statement("profiles.operators"), of_attempts))
                for row in connection.execute(statement("profiles.artifacts"), of_attempts):
                    files.setdefault(row.attempt_id, []).append(struct_of(ArtifactRecord, row))
        if not found:
            where = f"run {run_id}" if run_id else "the store"
            what = "any job" if job_pattern == "*" else job_pattern
            raise UsageError(
                f"{where} has no profile of {what}: a run with --profile detailed keeps one "
                f"({len(jobs)} job{'' if len(jobs) == 1 else 's'} looked at)"
            )
        return [
            struct_of(
                ProfileRecord,
                row,
                operators=tuple(operators.get(row.attempt_id, ())),
                artifacts=tuple(files.get(row.attempt_id, ())),
            )
            for row in found
        ]

    def fingerprints(self, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the facts of fingerprints, name to value, by their hash."""
        with self._database.reading() as connection:
            return fingerprints(connection, hashes)

    def background(self, run_id: str, runs: int = 30) -> Background:
        """Return the artifacts of a run, and the newest `runs` values of some metrics in its branch up to it.

        Values are of its kind of device. The answer is empty for a missing run.
        """
        with self._database.reading() as connection:
            run = connection.execute(statement("runs.run"), {"run": run_id}).first()
            if run is None:
                return Background()
            of = {
                "run": run_id,
                "kind": run.run_device_kind,
                "branch": run.run_branch,
                "older": runs - 1,
                "metrics": _TRENDS,
            }
            rows: list[Any] = []
            for name in ("history.trend_medians", "history.trend_counts"):
                rows += connection.execute(statement(name), of)
            rows.sort(key=lambda row: row[:2])
            series = {row.id: row for row in connection.execute(statement("history.trend_series"), of)}
            runs_of_rows = in_parts(connection, statement("history.began"), sorted({row.run_id for row in rows}))
            began = {row.id: (row.started_ms, row.fingerprint_hash) for row in runs_of_rows}
            trends: dict[str, list[TrendSeries]] = {}
            for series_id, of_series in groupby(rows, key=lambda row: row.series_id):
                points = tuple(
                    TrendPoint(in_run, *began[in_run], str(case_id), values.level_of(metric, p50, samples))
                    for _, in_run, case_id, p50, metric, samples in of_series
                )
                one = series[series_id]
                trends.setdefault(one.name, []).append(TrendSeries(one.metric, one.unit, one.direction, points))
            found = connection.execute(statement("runs.artifacts"), {"run": run_id, "job": 0})
            artifacts = grouped((row.job_id, struct_of(JobFile, row)) for row in found)
            return Background(
                trends={name: tuple(series) for name, series in trends.items()},
                facts=fingerprints(connection, {fingerprint for _, fingerprint in began.values()}),
                artifacts={name: tuple(records) for name, records in artifacts.items()},
            )


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


def _job_pasts(
    connection: Connection, job_ids: Mapping[int, str], until: str | None, *, branch: str
) -> Iterator[JobPast]:
    """Yield the newest 60 runs of jobs, id to name, in a branch, for each kind of device.

    With `until` only runs up to that run, which may be a local one, and only jobs with a verdict in it. Runs of
    `farm debug` are left out.
    """
    facts: dict[str, dict[str, str]] = {}
    for part in chunks(sorted(job_ids), _JOBS):
        of = {"jobs": part, "until": until or _NO_END, "most": _RUNS, "branch": branch}
        # For each job and run the attempt that decides, where it has a verdict about the code, oldest first.
        found = connection.execute(statement("history.pasts"), of).all()
        facts |= fingerprints(connection, {row.fingerprint_hash for row in found} - facts.keys())
        kinds = _series(connection, part)
        measured = _levels(connection, [row.attempt_id for row in found], kinds)
        for (job_id, _), rows in grouped(((row.job_id, row.kind), row) for row in found).items():
            if until is None or rows[-1].run_id == until:
                yield _past(job_ids[job_id], rows, facts, measured, kinds)


def _levels(
    connection: Connection, attempt_ids: Sequence[int], kinds: Mapping[int, Series]
) -> dict[int, list[tuple[int, float]]]:
    """Return by attempt its series and their values: medians, and of figures of outputs what decides."""
    found: dict[int, list[tuple[int, float]]] = {}
    figures = {number: one.metric for number, one in kinds.items() if figure_of(one.metric) is not None}
    for name in ("history.past_medians", "history.past_counts"):
        for attempt_id, series_id, median in in_parts(connection, statement(name), attempt_ids):
            if series_id not in figures:
                found.setdefault(attempt_id, []).append((series_id, float(median)))
    for attempts in chunks(attempt_ids):
        for series in chunks(sorted(figures)):
            of = {"attempts": attempts, "series": series}
            for attempt_id, series_id, samples in connection.execute(statement("history.past_samples"), of):
                if (level := values.level_of(figures[series_id], None, samples)) is not None:
                    found.setdefault(attempt_id, []).append((series_id, level))
    return found


def _series(connection: Connection, job_ids: Sequence[int]) -> dict[int, Series]:
    return {
        row.id: Series(str(row.id), row.metric, row.unit, Direction(row.direction), exact=row.exact)
        for row in connection.execute(statement("history.series"), {"jobs": job_ids})
    }


def _past(
    job_id: str,
    rows: Sequence[Row[Any]],
    facts: Mapping[str, dict[str, str]],
    measured: Mapping[int, Iterable[tuple[int, float]]],
    kinds: Mapping[int, Series],
) -> JobPast:
    by_series: dict[int, list[float]] = {}
    for index, row in enumerate(rows):
        for series_id, median in measured.get(row.attempt_id, ()):
            by_series.setdefault(series_id, [math.nan] * len(rows))[index] = median
    return JobPast(
        job_id,
        tuple(_point_of_run(row, facts[row.fingerprint_hash]) for row in rows),
        tuple(SeriesPast(one, kinds[one], tuple(medians)) for one, medians in sorted(by_series.items())),
    )


def _point_of_run(row: Row[Any], facts: Mapping[str, str]) -> Point:
    return Point(
        run_id=row.run_id,
        started_ms=row.started_ms,
        # The device's own kind: a run may have been asked for another one.
        facts={**facts, **device_facts(row.build, row.runtime), "device_kind": row.kind},
        device_kind=row.kind,
        case_version=row.version,
        bundle=row.bundle_key,
        device=row.serial,
    )


def _tries(
    connection: Connection, since: Mapping[int, str], kind: str, until: str, branch: str
) -> dict[int, list[Try]]:
    """Return the verdicts of jobs, each since a run of its own, oldest first."""
    if not since:
        return {}
    of = {"jobs": list(since), "since": min(since.values()), "until": until, "kind": kind, "branch": branch}
    planned = connection.execute(statement("history.planned"), of)
    rows = {row.id: row for row in planned if row.run_id >= since[row.job_id]}
    verdicts = in_parts(connection, statement("history.tries"), rows, FEW)
    found: dict[int, list[Try]] = {}
    for one in sorted(verdicts, key=lambda one: (rows[one.run_job_id].run_id, one.id)):
        row = rows[one.run_job_id]
        # Identity of the code: the three values that a verdict depends on apart from the device.
        code = f"{one.bundle_key} {row.fingerprint_hash} {row.judged_by}" if one.bundle_key else ""
        found.setdefault(row.job_id, []).append(Try(row.run_id, code, one.verdict == Verdict.PASSED))
    return found
