"""Numbers of jobs run by run, for `farm.results.analysis`: one value per run, and all facts that it depends on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row

from farm.results.analysis.history import Point
from farm.results.analysis.scale import Series
from farm.results.attempt import Direction
from farm.store import values
from farm.store.details import device_facts, fingerprints
from farm.store.queries.flakiness import NO_END
from farm.store.statements import chunks, statement
from farm.suites.figures import figure_of

RUNS = 60
"""So far back is looked: a baseline of 21, and as many of other toolchains, devices and people in between."""

# So many that their runs are looked for along an index by PostgreSQL as well, and take some megabytes.
_JOBS = 50


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
    device: str
    """Device of the newest run."""
    runs: tuple[Point, ...]
    """Runs, oldest first, without values, which belong to the series."""
    series: tuple[SeriesPast, ...]


def job_pasts(
    connection: Connection, job_ids: Mapping[int, str], until: str | None, *, branch: str, most: int = RUNS
) -> Iterator[JobPast]:
    """Yield the newest `most` runs of jobs, id to name, in a branch, for each kind of device.

    With `until` only runs up to that run, which may be a local one, and only jobs with a verdict in it. Runs of
    `farm debug` are left out.
    """
    facts: dict[str, dict[str, str]] = {}
    for part in chunks(sorted(job_ids), _JOBS):
        of = {"jobs": part, "until": until or NO_END, "most": most, "branch": branch}
        # For each job and run the attempt that decides, where it has a verdict about the code, oldest first.
        found = connection.execute(statement("history.pasts"), of).all()
        facts |= fingerprints(connection, {row.fingerprint_hash for row in found} - facts.keys())
        kinds = _series(connection, part)
        measured = _levels(connection, [row.attempt_id for row in found], kinds)
        by_job: dict[tuple[int, str], list[Row[Any]]] = {}
        for row in found:
            by_job.setdefault((row.job_id, row.kind), []).append(row)
        for (job_id, _), rows in by_job.items():
            if until is None or rows[-1].run_id == until:
                yield _past(job_ids[job_id], rows, facts, measured, kinds)


def _levels(
    connection: Connection, attempt_ids: Sequence[int], kinds: Mapping[int, Series]
) -> dict[int, list[tuple[int, float]]]:
    """Return by attempt its series and their values: medians, and of figures of outputs what decides."""
    found: dict[int, list[tuple[int, float]]] = {}
    figures = {number: one.metric for number, one in kinds.items() if figure_of(one.metric) is not None}
    for attempts in chunks(attempt_ids):
        for name in ("history.past_medians", "history.past_counts"):
            for attempt_id, series_id, median in connection.execute(statement(name), {"attempts": attempts}):
                if series_id not in figures:
                    found.setdefault(attempt_id, []).append((series_id, float(median)))
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
        rows[-1].serial,
        tuple(_point(row, facts[row.fingerprint_hash]) for row in rows),
        tuple(SeriesPast(one, kinds[one], tuple(medians)) for one, medians in sorted(by_series.items())),
    )


def _point(row: Row[Any], facts: Mapping[str, str]) -> Point:
    return Point(
        run_id=row.run_id,
        started_ms=row.started_ms,
        value=math.nan,
        # The device's own kind: a run may have been asked for another one.
        facts={**facts, **device_facts(row.build, row.runtime), "device_kind": row.kind},
        device_kind=row.kind,
        case_version=row.version,
        bundle=row.bundle_key,
        device=row.serial,
    )
