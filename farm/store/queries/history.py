"""What jobs measured, attempt by attempt; `farm.store.store.Store.history` says what it returns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import and_, case, func, or_, select

from farm.errors import UnknownNameError, UsageError
from farm.store import schema, values
from farm.store.records import HistoryPoint
from farm.store.rows import chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection, Row, Subquery

    from farm.analysis.flakiness import Record
    from farm.store.database import Database
    from farm.store.queries.points import JobPast
    from farm.store.records import Background

_NOTHING = "(the store has no job yet: 'farm run' makes some)"
# Ids in one statement; nobody reads the history of more.
_MOST_PARAMETERS = 10_000


class _Figure(NamedTuple):
    metric: str
    unit: str
    direction: str
    exact: bool
    p50: float | None
    n: int


_NO_FIGURE = _Figure("", "", "", exact=False, p50=None, n=0)


def history(
    connection: Connection, job_pattern: str, metric: str | None, soc: str | None, limit: int
) -> list[HistoryPoint]:
    """Return points grouped by job, device kind and metric, oldest first in each group."""
    jobs = matching_jobs(connection, values.clean(job_pattern), soc and values.clean(soc))
    attempts = _newest_attempts(connection, jobs, limit)
    figures = _figures(connection, [row.attempt_id for row in attempts])
    if metric is not None:
        _check_metric(connection, jobs, metric)
    points = []
    for row in attempts:
        measured = [figure for figure in figures.get(row.attempt_id, ()) if metric in (None, figure.metric)]
        # An attempt that failed is part of the history of what was asked for.
        measured = measured or [_NO_FIGURE._replace(metric=metric or "")]
        points += [_point(row, figure) for figure in measured]
    return sorted(points, key=lambda point: (point.job_id, point.device_kind, point.metric))


def matching_jobs(connection: Connection, pattern: str, soc: str | None, run_id: str | None = None) -> dict[int, str]:
    """Return the jobs that `pattern` means, id to name; those of a run where `run_id` is given, which may be none."""
    job = schema.job.c
    query = select(job.id, job.name, job.suite, job.soc).order_by(job.name)
    suite, _, name = pattern.partition("/")
    of_case = and_(job.suite == suite, job.case_name == values.case_column(name))
    # What is named as it is needs no look at all names.
    found: Any = connection.execute(query.where(or_(job.name == pattern, job.suite == pattern, of_case))).all()
    if not found:
        rows: Any = connection.execute(query).all()
        expression = _expression(pattern)
        found = [row for row in rows if any(map(expression.fullmatch, _names(row)))]
    if not found:
        known = {name for row in rows for name in _names(row)[1:]} if "[" not in pattern else {r.name for r in rows}
        raise UnknownNameError("job", pattern, known, "" if known else _NOTHING)
    if soc is not None:
        of_soc = [row for row in found if row.soc.casefold() == soc.casefold()]
        if not of_soc:
            raise UnknownNameError("SoC", soc, {row.soc for row in found}, f"in the history of {pattern}")
        found = of_soc
    if run_id is not None:
        run_job = schema.run_job.c
        of_run = set(connection.scalars(select(run_job.job_id).where(run_job.run_id == run_id)))
        found = [row for row in found if row.id in of_run]
    if len(found) > _MOST_PARAMETERS:
        raise UsageError(f"{len(found)} jobs match {pattern!r}: name a suite or an SoC as well")
    return {row.id: row.name for row in found}


def device_facts(build: str | None, runtime: Mapping[str, str] | None) -> dict[str, str]:
    """Return what numbers depend on besides the run's fingerprint, name to value."""
    facts = dict(runtime or {})
    if "runner" in facts:
        # In place of that of the machine which the device is attached to.
        facts["native_runner"] = facts.pop("runner")
    return facts | ({"device_build": build} if build else {})


def not_debugged() -> ColumnElement[bool]:
    """Return the condition that a run is none of `farm debug`, whose programs write every layer."""
    fingerprint = schema.fingerprint.c
    debugged = select(fingerprint.hash).where(fingerprint.facts["debug"].as_string().is_not(None))
    return schema.run.c.fingerprint_hash.not_in(debugged)


def fingerprints(connection: Connection, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return fingerprints by their hash."""
    fingerprint = schema.fingerprint.c
    found: dict[str, dict[str, str]] = {}
    for part in chunks(sorted(set(hashes))):
        rows = connection.execute(select(fingerprint.hash, fingerprint.facts).where(fingerprint.hash.in_(part)))
        found |= {row.hash: row.facts for row in rows}
    return found


def _names(row: Any) -> tuple[str, str, str]:
    return row.name, f"{row.suite}/{values.case_of(row.name)}", row.suite


def _expression(pattern: str) -> re.Pattern[str]:
    # Not fnmatch: brackets are part of a job's id.
    parts = {"*": ".*", "?": "."}
    return re.compile("".join(parts.get(c, re.escape(c)) for c in re.sub(r"\*+", "*", pattern)), re.IGNORECASE)


def _newest_attempts(connection: Connection, jobs: dict[int, str], limit: int) -> Sequence[Row[Any]]:
    """Return the newest `limit` attempts of every job and device kind, oldest first."""
    attempt, run_job, run, device = schema.attempt.c, schema.run_job.c, schema.run.c, schema.device.c
    run_device = schema.run_device.c
    kinds = _run_kinds()
    kind = func.coalesce(device.kind, kinds.c.kind, "").label("device_kind")
    order = (run.started_ms.desc(), attempt.id.desc())
    ranked = (
        select(
            attempt.id.label("attempt_id"),
            schema.job.c.name.label("job_id"),
            run.id.label("run_id"),
            case((attempt.started_ms > 0, attempt.started_ms), else_=run.started_ms).label("time_ms"),
            run.started_ms.label("run_started_ms"),
            run.fingerprint_hash,
            schema.suite_case.c.version.label("case_version"),
            func.coalesce(device.serial, "").label("device"),
            kind,
            attempt.verdict,
            attempt.known_issue,
            device.build,
            schema.run_device.c.runtime,
            func.row_number().over(partition_by=(run_job.job_id, kind), order_by=order).label("age"),
        )
        .select_from(
            schema.attempt.join(schema.run_job)
            .join(schema.run)
            .join(schema.job, schema.job.c.id == run_job.job_id)
            .join(schema.suite_case, schema.suite_case.c.id == run_job.case_id)
            .outerjoin(schema.device, device.id == attempt.device_id)
            .outerjoin(schema.run_device, (run_device.run_id == run.id) & (run_device.device_id == device.id))
            .outerjoin(kinds, kinds.c.run_id == run.id)
        )
        .where(run_job.job_id.in_(jobs), not_debugged())
        .subquery()
    )
    query = select(ranked).where(ranked.c.age <= limit).order_by(ranked.c.run_started_ms, ranked.c.attempt_id)
    return connection.execute(query).all()


def _run_kinds() -> Subquery:
    """Return the device kind of runs that have one only, for attempts that needed no device."""
    device, run_device = schema.device.c, schema.run_device.c
    return (
        select(run_device.run_id, func.min(device.kind).label("kind"))
        .select_from(schema.run_device.join(schema.device))
        .group_by(run_device.run_id)
        .having(func.min(device.kind) == func.max(device.kind))
        .subquery()
    )


def _figures(connection: Connection, attempt_ids: Sequence[int]) -> dict[int, list[_Figure]]:
    """Return what attempts measured, by attempt id."""
    series = schema.series.c
    found: dict[int, list[_Figure]] = {}
    for table, p50 in ((schema.measurement, schema.measurement.c.p50), (schema.counter, schema.counter.c.value)):
        columns = (series.metric, series.unit, series.direction, series.exact)
        query = select(table.c.attempt_id, *columns, p50.label("p50"), table.c.n).join(schema.series)
        for start in range(0, len(attempt_ids), _MOST_PARAMETERS):
            part = attempt_ids[start : start + _MOST_PARAMETERS]
            for row in connection.execute(query.where(table.c.attempt_id.in_(part))):
                found.setdefault(row.attempt_id, []).append(_Figure(*row[1:]))
    return found


def _check_metric(connection: Connection, jobs: dict[int, str], metric: str) -> None:
    series = schema.series.c
    known = set(connection.scalars(select(series.metric).where(series.job_id.in_(jobs)).distinct()))
    if metric not in known:
        raise UnknownNameError("metric", metric, known, "" if known else "(these jobs never measured anything)")


def _point(row: Row[Any], figure: _Figure) -> HistoryPoint:
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
        device_facts=device_facts(row.build, row.runtime),
        **figure._asdict(),
    )


class HistoryReader:
    """What jobs did, run by run; runs of `farm debug` are left out.

    Every method is one transaction and raises StoreError when the database refuses. A job pattern is a job's id,
    `suite/case`, a suite, or any of these with `*` and `?`; for a job, metric or SoC that the store has never seen,
    UnknownNameError is raised with the nearest name.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def points(
        self, job_pattern: str, metric: str | None = None, soc: str | None = None, limit: int = 20
    ) -> list[HistoryPoint]:
        """Return what jobs measured, grouped by job, device kind and metric, oldest first in each group.

        None as `metric` is every metric. `limit` counts the newest attempts of a job on a device kind.
        """
        with self._database.reading() as connection:
            return history(connection, job_pattern, metric, soc, limit)

    def job_names(self, job_pattern: str, soc: str | None = None) -> list[str]:
        """Return the ids of the jobs that a pattern means."""
        with self._database.reading() as connection:
            found = matching_jobs(connection, values.clean(job_pattern), soc and values.clean(soc))
        return list(found.values())

    def pasts_of_run(self, run_id: str) -> list[JobPast]:
        """Return what the jobs that a run judged measured, then and in the runs before it, for each kind of device.

        Raises UnknownNameError.
        """
        from farm.store.queries import points
        from farm.store.queries.runs import resolve_run

        with self._database.reading() as connection:
            jobs = points.jobs_of_run(connection, resolve_run(connection, run_id))
            return list(points.job_pasts(connection, jobs, run_id))

    def pasts_of_jobs(self, job_pattern: str, soc: str | None = None, most: int = 60) -> list[JobPast]:
        """Return what the newest `most` runs of jobs measured."""
        from farm.store.queries import points

        with self._database.reading() as connection:
            jobs = matching_jobs(connection, values.clean(job_pattern), soc and values.clean(soc))
            return list(points.job_pasts(connection, jobs, None, most=most))

    def reliability(
        self, job_ids: Collection[str], kind: str, until: str = "", *, failed_of_late: bool = False
    ) -> dict[str, Record]:
        """Return how jobs did in their last 40 runs on devices of a kind, up to run `until`: pass rate, flakiness.

        Jobs without a verdict about their code are left out; with `failed_of_late` those, too, that did not fail in
        these runs.
        """
        from farm.store.queries import flakiness

        with self._database.reading() as connection:
            return flakiness.reliability(connection, job_ids, kind, until, failed_of_late=failed_of_late)

    def fingerprints(self, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the facts of fingerprints, name to value, by their hash."""
        with self._database.reading() as connection:
            return fingerprints(connection, hashes)

    def background(self, run_id: str, runs: int = 30) -> Background:
        """Return what the jobs of a run measured in their newest `runs` up to it, on its kind of device, and its files.

        Nothing is there for a run that is not.
        """
        from farm.store.queries import trends

        with self._database.reading() as connection:
            return trends.background(connection, run_id, runs)
