"""What jobs measured run by run, for `farm.analysis`: one value a run, and everything that it depends on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, select

from farm.analysis.history import Point
from farm.analysis.scale import Series
from farm.results.attempt import Direction, Verdict
from farm.store import schema
from farm.store.queries.history import device_facts, fingerprints, not_debugged
from farm.store.rows import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Row

RUNS = 60
"""So far back is looked: a baseline of 21, and as many of other toolchains, devices and people in between."""

_ABOUT_THE_CODE = (Verdict.PASSED, Verdict.FAILED)
# So many that their runs are looked for along an index by PostgreSQL as well, and take some megabytes.
_JOBS = 50


class SeriesPast(msgspec.Struct, frozen=True):
    """One metric of a job over its runs."""

    id: int
    """Of the row in the store."""
    series: Series
    values: tuple[float, ...]
    """For each of the job's runs the median of its samples; NaN where it has none."""


class JobPast(msgspec.Struct, frozen=True):
    """A job on one kind of device, run by run."""

    job_id: str
    device: str
    """Of the newest run."""
    runs: tuple[Point, ...]
    """Oldest first; without values, which are those of the series."""
    series: tuple[SeriesPast, ...]


def job_pasts(
    connection: Connection, job_ids: Mapping[int, str], until: str | None, *, most: int = RUNS
) -> Iterator[JobPast]:
    """Yield the newest `most` runs of jobs, id to name, for each kind of device.

    With `until` those up to that run, and only of jobs that it has a verdict of. Where a run has several attempts at a
    job, the last with a verdict about the code counts. Runs of `farm debug` are left out.
    """
    facts: dict[str, dict[str, str]] = {}
    for part in chunks(sorted(job_ids), _JOBS):
        found = _attempts(connection, part, until, most)
        facts |= fingerprints(connection, {row.fingerprint_hash for row in found} - facts.keys())
        measured = _medians(connection, [row.attempt_id for row in found])
        by_job: dict[tuple[int, str], list[Row[Any]]] = {}
        for row in found:
            by_job.setdefault((row.job_id, row.kind), []).append(row)
        kinds = _series(connection, part)
        for (job_id, _), rows in by_job.items():
            if until is None or rows[-1].run_id == until:
                yield _past(job_ids[job_id], rows, facts, measured, kinds)


def jobs_of_run(connection: Connection, run_id: str) -> dict[int, str]:
    """Return the jobs that a run was to do, id to name."""
    run_job = schema.run_job
    query = select(schema.job.c.id, schema.job.c.name).join(run_job).where(run_job.c.run_id == run_id)
    return {row.id: row.name for row in connection.execute(query)}


def _attempts(connection: Connection, job_ids: Sequence[int], until: str | None, most: int) -> list[Row[Any]]:
    """Return for each job and run the attempt that counts, oldest first."""
    run_job, attempt, run, device = schema.run_job.c, schema.attempt.c, schema.run.c, schema.device.c
    run_device = schema.run_device.c
    # Along the index of a job's runs alone, whose ids sort by time.
    age = func.row_number().over(partition_by=run_job.job_id, order_by=run_job.run_id.desc()).label("age")
    ranked = (
        select(run_job.id, run_job.job_id, run_job.run_id, run_job.case_id, age)
        .where(run_job.job_id.in_(job_ids), *([] if until is None else [run_job.run_id <= until]))
        .subquery()
    )
    query = (
        select(
            ranked.c.job_id,
            ranked.c.run_id,
            attempt.id.label("attempt_id"),
            attempt.bundle_key,
            run.started_ms,
            run.fingerprint_hash,
            schema.suite_case.c.version,
            device.serial,
            device.kind,
            device.build,
            schema.run_device.c.runtime,
        )
        .select_from(
            ranked.join(schema.attempt, attempt.run_job_id == ranked.c.id)
            .join(schema.run, run.id == ranked.c.run_id)
            .join(schema.device, device.id == attempt.device_id)
            .outerjoin(schema.run_device, (run_device.run_id == ranked.c.run_id) & (run_device.device_id == device.id))
            .join(schema.suite_case, schema.suite_case.c.id == ranked.c.case_id)
        )
        .where(ranked.c.age <= most, attempt.verdict.in_(_ABOUT_THE_CODE), not_debugged())
        .order_by(ranked.c.run_id, attempt.id)
    )
    last: dict[tuple[int, str], Row[Any]] = {}
    rows: Any = connection.execute(query)
    for row in rows:
        last[row.job_id, row.run_id] = row
    return list(last.values())


def _medians(connection: Connection, attempt_ids: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
    """Return by attempt its series and their medians."""
    found: dict[int, list[tuple[int, float]]] = {}
    for table, value in ((schema.measurement, schema.measurement.c.p50), (schema.counter, schema.counter.c.value)):
        query = select(table.c.attempt_id, table.c.series_id, value)
        for part in chunks(attempt_ids):
            for attempt_id, series_id, median in connection.execute(query.where(table.c.attempt_id.in_(part))):
                if median is not None:
                    found.setdefault(attempt_id, []).append((series_id, float(median)))
    return found


def _series(connection: Connection, job_ids: Sequence[int]) -> dict[int, Series]:
    series = schema.series.c
    query = select(schema.series).where(series.job_id.in_(job_ids))
    return {
        row.id: Series(
            str(row.id), row.metric, row.unit, Direction(row.direction) if row.direction else None, exact=row.exact
        )
        for row in connection.execute(query)
    }


def _past(
    job_id: str,
    rows: Sequence[Row[Any]],
    facts: Mapping[str, dict[str, str]],
    measured: Mapping[int, Iterable[tuple[int, float]]],
    kinds: Mapping[int, Series],
) -> JobPast:
    values: dict[int, list[float]] = {}
    for index, row in enumerate(rows):
        for series_id, median in measured.get(row.attempt_id, ()):
            values.setdefault(series_id, [math.nan] * len(rows))[index] = median
    return JobPast(
        job_id,
        rows[-1].serial,
        tuple(_point(row, facts[row.fingerprint_hash]) for row in rows),
        tuple(SeriesPast(one, kinds[one], tuple(medians)) for one, medians in sorted(values.items())),
    )


def _point(row: Row[Any], facts: Mapping[str, str]) -> Point:
    return Point(
        run_id=row.run_id,
        started_ms=row.started_ms,
        value=math.nan,
        # The device's own kind: a run may have been told another one.
        facts={**facts, **device_facts(row.build, row.runtime), "device_kind": row.kind},
        device_kind=row.kind,
        case_version=row.version,
        bundle=row.bundle_key,
    )
