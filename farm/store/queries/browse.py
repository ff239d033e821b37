"""What somebody who looks around asks of the store: runs in pages, how far they are, what ran on a device, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import case, func, or_, select

from farm.results.attempt import Verdict
from farm.store import schema, values
from farm.store.clock import clock_ms
from farm.store.queries.history import matching_jobs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import ColumnElement, Connection, Select

    from farm.store.clock import Clock
    from farm.store.database import Database

_DAY_MS = 86_400_000
# A run that ended a moment ago is still on somebody's screen.
_JUST_ENDED_MS = 600_000
_KNOWN_LIMIT = 200
_PASSED, _FAILED = 0, 1
_OF_ATTEMPT = ("id", "verdict", "known_issue", "stage", "cause", "reason", "recorded_ms", "seconds")

STATES = ("unfinished", "passed", "failed", "other")
"""Of a run: no end, exit code 0, exit code 1, any other exit code."""


class RunFilter(msgspec.Struct, frozen=True):
    """Which runs; what is empty says nothing."""

    user: str = ""
    priority: str = ""
    soc: str = ""
    suite: str = ""
    state: str = ""
    """One of `STATES`."""


class Progress(msgspec.Struct, frozen=True):
    """How far a run is."""

    run_id: str
    planned: int
    """Jobs."""
    stale: int
    """Of them, left out for want of time."""
    counts: dict[str, int]
    """Jobs that have an attempt, by the verdict that decides; `known` are failures that are understood."""
    last_ms: int
    """When the last attempt was recorded; epoch, milliseconds, 0 for none."""
    finished_ms: int | None
    exit_code: int | None

    @property
    def done(self) -> int:
        """Jobs that have an attempt."""
        return sum(self.counts.values())


class ListedRun(msgspec.Struct, frozen=True):
    """A run without its jobs."""

    run_id: str
    command: str
    user: str
    host: str
    priority: str
    started_ms: int
    socs: tuple[str, ...]
    suites: tuple[str, ...]
    files: int
    """Artifacts of its attempts."""
    progress: Progress


class Known(msgspec.Struct, frozen=True):
    """What can be asked for, in alphabetical order."""

    users: tuple[str, ...]
    priorities: tuple[str, ...]
    socs: tuple[str, ...]
    suites: tuple[str, ...]


class DeviceAttempt(msgspec.Struct, frozen=True):
    """An attempt by what a device's page tells of it."""

    run_id: str
    job_id: str
    verdict: str
    known_issue: str
    stage: str
    cause: str
    reason: str
    recorded_ms: int
    seconds: float
    fingerprint: str
    """Hash of the run's."""
    case_version: str
    latency_ns: float | None
    """Median."""


class RunFile(msgspec.Struct, frozen=True):
    """An artifact of a run."""

    job_id: str
    kind: str
    size: int
    """Bytes."""
    sha256: str


class Browse:
    """Every method is one transaction that reads, and raises StoreError when the database refuses."""

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        self._database, self._clock = database, clock

    def version(self) -> tuple[Any, ...]:
        """Return what equals an earlier answer of this store only when nothing was committed in between."""
        return self._database.version()

    def runs(self, wanted: RunFilter, limit: int, offset: int = 0) -> tuple[list[ListedRun], int]:
        """Return `limit` runs from `offset` on, newest first, and how many there are in all."""
        run = schema.run.c
        conditions = _conditions(wanted)
        with self._database.reading() as connection:
            total = connection.scalar(select(func.count()).select_from(schema.run).where(*conditions)) or 0
            newest = run.started_ms.desc(), run.id.desc()
            query = select(schema.run).where(*conditions).order_by(*newest).limit(limit).offset(offset)
            rows = connection.execute(query).all()
            ids = [row.id for row in rows]
            progress = {one.run_id: one for one in _progress(connection, ids)}
            targets, files = _targets(connection, ids), _file_counts(connection, ids)
        listed = [
            ListedRun(
                run_id=row.id,
                command=row.command,
                user=row.user_name,
                host=row.host,
                priority=row.priority,
                started_ms=row.started_ms,
                socs=_distinct(soc for soc, _ in targets.get(row.id, ())),
                suites=_distinct(suite for _, suite in targets.get(row.id, ())),
                files=files.get(row.id, 0),
                progress=progress[row.id],
            )
            for row in rows
        ]
        return listed, total

    def progress(self) -> list[Progress]:
        """Return how far the runs of the last day are that have no end, or ended in the last minutes; newest first."""
        run = schema.run.c
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            live = or_(run.finished_ms.is_(None), run.finished_ms > now_ms - _JUST_ENDED_MS)
            query = select(run.id).where(run.started_ms > now_ms - _DAY_MS, live).order_by(run.started_ms.desc())
            return _progress(connection, list(connection.scalars(query.limit(_KNOWN_LIMIT))))

    def known(self) -> Known:
        """Return what runs can be filtered by: of each the first 200."""
        run, job = schema.run.c, schema.job.c
        with self._database.reading() as connection:
            columns = (run.user_name, run.priority, job.soc, job.suite)
            found = [list(connection.scalars(select(one).distinct().limit(_KNOWN_LIMIT))) for one in columns]
        return Known(*(tuple(sorted(one)) for one in found))

    def job_names(self, pattern: str, soc: str | None) -> list[str]:
        """Return the ids of the jobs that `pattern` means, as `Store.history` does. Raises as that does."""
        with self._database.reading() as connection:
            jobs = matching_jobs(connection, values.clean(pattern), soc and values.clean(soc))
        return sorted(jobs.values())

    def cases(self, limit: int) -> list[str]:
        """Return the names of cases that have jobs, with their suites: `suite/case`."""
        job = schema.job.c
        query = select(job.suite, job.case_name).distinct().order_by(job.suite, job.case_name).limit(limit)
        with self._database.reading() as connection:
            return [f"{suite}/{name}" for suite, name in connection.execute(query)]

    def on_device(self, serial: str, kind: str, limit: int) -> list[DeviceAttempt]:
        """Return the newest attempts on the devices of a kind that have this serial, newest first."""
        attempt, run_job = schema.attempt.c, schema.run_job.c
        here = select(schema.device.c.id).where(schema.device.c.serial == serial, schema.device.c.kind == kind)
        query = (
            select(
                run_job.run_id,
                schema.job.c.name.label("job_id"),
                schema.run.c.fingerprint_hash.label("fingerprint"),
                schema.suite_case.c.version.label("case_version"),
                *(attempt[name] for name in _OF_ATTEMPT),
            )
            .select_from(
                schema.attempt.join(schema.run_job)
                .join(schema.run, schema.run.c.id == run_job.run_id)
                .join(schema.job, schema.job.c.id == run_job.job_id)
                .join(schema.suite_case, schema.suite_case.c.id == run_job.case_id)
            )
            .where(attempt.device_id.in_(here))
            .order_by(attempt.id.desc())
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            latency = _latencies(connection, [row.id for row in rows])
        found = []
        for row in rows:
            facts = dict(row._mapping)  # noqa: SLF001 - public in SQLAlchemy
            latency_ns = latency.get(facts.pop("id"))
            found.append(DeviceAttempt(**facts, latency_ns=latency_ns))
        return found

    def files(self, run_id: str, limit: int) -> list[RunFile]:
        """Return the artifacts of a run, by job, oldest first."""
        artifact = schema.artifact.c
        query = (
            select(schema.job.c.name, artifact.kind, artifact.size, artifact.sha256)
            .select_from(schema.artifact.join(schema.attempt).join(schema.run_job).join(schema.job))
            .where(schema.run_job.c.run_id == run_id)
            .order_by(schema.run_job.c.position, artifact.id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [RunFile(*row) for row in connection.execute(query)]

    def file_kind(self, sha256: str) -> str | None:
        """Return what an artifact is, `etdump` or the like; None for one that no attempt has."""
        artifact = schema.artifact.c
        query = select(artifact.kind).where(artifact.sha256 == values.clean(sha256)).limit(1)
        with self._database.reading() as connection:
            kind: str | None = connection.scalar(query)
            return kind


def _conditions(wanted: RunFilter) -> list[ColumnElement[bool]]:
    run, job = schema.run.c, schema.job.c
    found: list[ColumnElement[bool]] = []
    if wanted.user:
        found.append(run.user_name == values.clean(wanted.user))
    if wanted.priority:
        found.append(run.priority == values.clean(wanted.priority))
    if wanted.soc or wanted.suite:
        of = [
            column == values.clean(name) for column, name in ((job.soc, wanted.soc), (job.suite, wanted.suite)) if name
        ]
        planned = select(schema.run_job.c.id).join(schema.job).where(schema.run_job.c.run_id == run.id, *of)
        found.append(planned.exists())
    states = {
        "unfinished": run.finished_ms.is_(None),
        "passed": run.exit_code == _PASSED,
        "failed": run.exit_code == _FAILED,
        "other": run.exit_code.not_in((_PASSED, _FAILED)),
    }
    return [*found, states[wanted.state]] if wanted.state else found


def _progress(connection: Connection, run_ids: Sequence[str]) -> list[Progress]:
    """Return how far runs are, in their order."""
    run, run_job, attempt = schema.run.c, schema.run_job.c, schema.attempt.c
    ends = {row.id: row for row in connection.execute(select(schema.run).where(run.id.in_(run_ids)))}
    left_out = func.sum(case((run_job.stale.is_not(None), 1), else_=0))
    query = select(run_job.run_id, func.count(), left_out).where(run_job.run_id.in_(run_ids)).group_by(run_job.run_id)
    planned = {run_id: (count, stale) for run_id, count, stale in connection.execute(query)}
    # The attempt that decides, in the manner of `farm.results.attempt.final_attempt`.
    judged = func.max(case((attempt.verdict != Verdict.INFRA, attempt.id)))
    decides = (
        select(run_job.run_id, func.coalesce(judged, func.max(attempt.id)).label("attempt_id"))
        .select_from(schema.run_job.join(schema.attempt))
        .where(run_job.run_id.in_(run_ids))
        .group_by(run_job.run_id, run_job.id)
        .subquery()
    )
    outcome = case(
        (attempt.known_issue == "", attempt.verdict),
        (attempt.verdict == Verdict.FAILED, "known"),
        else_=attempt.verdict,
    )
    counted = (
        select(decides.c.run_id, outcome, func.count(), func.max(attempt.recorded_ms))
        .select_from(decides.join(schema.attempt, attempt.id == decides.c.attempt_id))
        .group_by(decides.c.run_id, outcome)
    )
    counts: dict[str, dict[str, int]] = {}
    last: dict[str, int] = {}
    for run_id, verdict, count, recorded_ms in connection.execute(counted):
        counts.setdefault(run_id, {})[verdict] = count
        last[run_id] = max(last.get(run_id, 0), recorded_ms)
    return [
        Progress(
            run_id=run_id,
            planned=planned.get(run_id, (0, 0))[0],
            stale=planned.get(run_id, (0, 0))[1],
            counts=dict(sorted(counts.get(run_id, {}).items())),
            last_ms=last.get(run_id, 0),
            finished_ms=ends[run_id].finished_ms,
            exit_code=ends[run_id].exit_code,
        )
        for run_id in run_ids
    ]


def _targets(connection: Connection, run_ids: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Return SoCs with suites that runs have jobs for."""
    job, run_job = schema.job.c, schema.run_job.c
    query: Select[Any] = (
        select(run_job.run_id, job.soc, job.suite)
        .select_from(schema.run_job.join(schema.job))
        .where(run_job.run_id.in_(run_ids))
        .distinct()
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for run_id, soc, suite in connection.execute(query):
        found.setdefault(run_id, []).append((soc, suite))
    return found


def _file_counts(connection: Connection, run_ids: Collection[str]) -> dict[str, int]:
    run_job = schema.run_job.c
    query = (
        select(run_job.run_id, func.count())
        .select_from(schema.artifact.join(schema.attempt).join(schema.run_job))
        .where(run_job.run_id.in_(run_ids))
        .group_by(run_job.run_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def _latencies(connection: Connection, attempt_ids: Collection[int]) -> dict[int, float]:
    measurement, series = schema.measurement.c, schema.series.c
    query = (
        select(measurement.attempt_id, measurement.p50)
        .select_from(schema.measurement.join(schema.series))
        .where(measurement.attempt_id.in_(attempt_ids), series.metric == "latency", measurement.p50.is_not(None))
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))
