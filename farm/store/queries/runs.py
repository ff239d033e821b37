"""What is asked of the store, each a function of a connection; `farm.store.store.Store` says what they return."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, select

from farm.errors import UnknownNameError, UsageError
from farm.results.attempt import Attempt, Cause, Comparison, Direction, Measurement, Stage, Verdict
from farm.store import schema, values
from farm.store.details import layers_of, operators_of
from farm.store.records import ArtifactRecord
from farm.store.rows import ATTEMPT_COLUMNS, FIGURES
from farm.store.view import DeviceView, JobView, RunView, Stale

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Row, Select, Table

    from farm.store.database import Database
    from farm.store.records import LastVerdict, ListedJob


_LATEST = re.compile(r"latest(?:~(\d{1,9}))?")


def latest_run_id(connection: Connection) -> str | None:
    """Return the run that began last."""
    newest: str | None = connection.scalar(_newest_first().limit(1))
    return newest


def resolve_run(connection: Connection, ref: str) -> str:
    """Return the run id that `ref` means."""
    ref = values.clean(ref, values.NAME_LIMIT)
    match = _LATEST.fullmatch(ref)
    if match:
        return _back(connection, ref, int(match.group(1) or 0))
    begin_so: list[str] = list(
        connection.scalars(_newest_first().where(schema.run.c.id.startswith(ref, autoescape=True)).limit(9))
    )
    if ref in begin_so:
        return ref
    if len(begin_so) == 1:
        return begin_so[0]
    if begin_so and ref:
        shown = ", ".join(begin_so[:8]) + (", ..." if len(begin_so) > 8 else "")
        raise UsageError(f"several runs begin with {ref!r}: {shown}")
    known = list(connection.scalars(_newest_first().limit(1000)))
    raise UnknownNameError("run", ref, known, "" if known else "(the store has none: 'farm run' makes one)")


def run_view(connection: Connection, run_id: str) -> RunView:
    """Return all that is known of a run."""
    query = select(schema.run, schema.fingerprint.c.facts).join(schema.fingerprint).where(schema.run.c.id == run_id)
    run = connection.execute(query).first()
    if run is None:
        return run_view(connection, resolve_run(connection, run_id))
    attempts = attempts_of(connection, run_id)
    return RunView(
        id=run.id,
        command=run.command,
        started_ms=run.started_ms,
        finished_ms=run.finished_ms,
        exit_code=run.exit_code,
        user=run.user_name,
        host=run.host,
        fingerprint=run.facts,
        devices=_devices(connection, run_id),
        jobs=_jobs(connection, run_id, attempts),
        priority=run.priority,
    )


def artifacts(connection: Connection, run_id: str, job_id: str | None) -> list[ArtifactRecord]:
    """Return the artifacts of a run, or of one of its jobs, oldest first."""
    artifact = schema.artifact.c
    query = (
        select(artifact.sha256, artifact.size, artifact.kind)
        .select_from(schema.artifact.join(schema.attempt).join(schema.run_job).join(schema.job))
        .where(schema.run_job.c.run_id == run_id)
        .order_by(artifact.id)
    )
    if job_id is not None:
        query = query.where(schema.job.c.name == job_id)
    return [ArtifactRecord(row.sha256, row.size, row.kind) for row in connection.execute(query)]


def _newest_first() -> Select[Any]:
    return select(schema.run.c.id).order_by(schema.run.c.started_ms.desc(), schema.run.c.id.desc())


def _back(connection: Connection, ref: str, steps: int) -> str:
    found: str | None = connection.scalar(_newest_first().offset(steps).limit(1))
    if found is not None:
        return found
    count = connection.scalar(select(func.count()).select_from(schema.run))
    has = f"has {count} runs" if count else "has no run yet: 'farm run' makes one"
    raise UsageError(f"{ref}: the store {has}")


def devices_of(connection: Connection, run_id: str) -> Sequence[Row[Any]]:
    """Return the devices that had a part in a run, in an order that is the same in every store."""
    query = (
        select(schema.device, schema.run_device.c.runtime)
        .select_from(schema.run_device.join(schema.device))
        .where(schema.run_device.c.run_id == run_id)
    )
    # Not by the database: two have two orders of text.
    return sorted(connection.execute(query), key=lambda row: (row.serial, row.soc, row.kind, row.build))


def _devices(connection: Connection, run_id: str) -> tuple[DeviceView, ...]:
    attempt = schema.attempt.c
    query = (
        select(attempt.device_id, attempt.run_job_id, attempt.seconds)
        .select_from(schema.attempt.join(schema.run_job))
        .where(schema.run_job.c.run_id == run_id, attempt.device_id.is_not(None))
    )
    used: dict[int, list[tuple[int, float]]] = {}
    for device_id, run_job_id, seconds in connection.execute(query):
        used.setdefault(device_id, []).append((run_job_id, seconds))
    return tuple(
        DeviceView(
            row.serial,
            row.soc,
            row.kind,
            row.build,
            len({run_job_id for run_job_id, _ in used.get(row.id, ())}),
            # Whatever the order of the rows, which may be another one in another store.
            math.fsum(seconds for _, seconds in used.get(row.id, ())),
            row.runtime or {},
        )
        for row in devices_of(connection, run_id)
    )


def _jobs(connection: Connection, run_id: str, attempts: dict[int, list[Attempt]]) -> tuple[JobView, ...]:
    job, run_job = schema.job.c, schema.run_job.c
    query = (
        select(schema.run_job, *_CASE_COLUMNS, job.name, *(job[name] for name in _JOB_COLUMNS))
        .select_from(schema.run_job.join(schema.job).join(schema.suite_case))
        .where(run_job.run_id == run_id)
        .order_by(run_job.position, run_job.id)
    )
    return tuple(
        JobView(
            id=row.name,
            suite=row.suite,
            case=values.case_of(row.name),
            soc=row.soc,
            backend=row.backend,
            precision=row.precision,
            attempts=tuple(attempts.get(row.id, ())),
            build_seconds=row.build_seconds or 0.0,
            cached=bool(row.cached),
            fallback_ops=row.fallback_ops or {},
            case_module=row.module,
            options=row.options,
            case_version=row.version,
            stale=msgspec.convert(row.stale, Stale | None),
        )
        for row in connection.execute(query)
    )


_CASE_COLUMNS = (schema.suite_case.c.module, schema.suite_case.c.version)
_JOB_COLUMNS = ("suite", "soc", "backend", "precision", "options")


def attempts_of(connection: Connection, run_id: str) -> dict[int, list[Attempt]]:
    """Return the attempts of a run by the id of their `run_job`, oldest first."""
    comparisons: dict[int, list[Comparison]] = {}
    for row in connection.execute(_of_run(schema.comparison, run_id)):
        comparisons.setdefault(row.attempt_id, []).append(comparison_of(row))
    measurements = _measurements(connection, run_id)
    operators = operators_of(connection.execute(_of_run(schema.op_profile, run_id)))
    layers = layers_of(connection.execute(_of_run(schema.layer, run_id)))
    attempt = schema.attempt.c
    query = (
        select(schema.attempt, schema.device.c.serial, schema.job.c.name.label("job_id"))
        .select_from(schema.attempt.join(schema.run_job).join(schema.job).outerjoin(schema.device))
        .where(schema.run_job.c.run_id == run_id)
        .order_by(attempt.id)
    )
    attempts: dict[int, list[Attempt]] = {}
    for row in connection.execute(query):
        found = attempt_of(
            row,
            ATTEMPT_COLUMNS,
            comparisons=tuple(comparisons.get(row.id, ())),
            measurements=tuple(m for _, m in sorted(measurements.get(row.id, {}).items())),
            operators=operators.get(row.id, ()),
            layers=layers.get(row.id, ()),
        )
        attempts.setdefault(row.run_job_id, []).append(found)
    return attempts


def attempt_of(row: Row[Any], columns: Iterable[str], **details: Any) -> Attempt:
    """Return the attempt that a row tells of: `columns` of its own, `job_id` and the device's `serial`."""
    facts = {name: row._mapping[name] for name in columns}  # noqa: SLF001 - public in SQLAlchemy
    facts |= {
        "verdict": Verdict(row.verdict),
        "stage": Stage(row.stage),
        "cause": Cause(row.cause),
        "notes": tuple(row.notes),
        "job_id": row.job_id,
        "device": row.serial or "",
    }
    return Attempt(**facts, **details)


def _of_run(table: Table, run_id: str, *more: Any) -> Select[Any]:
    """Return the query for the rows of `table` that belong to attempts of a run, in their order."""
    attempt_ids = (
        select(schema.attempt.c.id).join(schema.run_job).where(schema.run_job.c.run_id == run_id).scalar_subquery()
    )
    return (
        select(table, *more).where(table.c.attempt_id.in_(attempt_ids)).order_by(table.c.attempt_id, table.c.position)
    )


def comparison_of(row: Row[Any]) -> Comparison:
    """Return what a row of `comparison` says."""
    figures = {name: row._mapping[name] for name in FIGURES}  # noqa: SLF001 - public in SQLAlchemy
    figures |= dict.fromkeys(row.nan_figures, math.nan)
    return Comparison(output=row.output, reference=row.reference, violations=tuple(row.violations), **figures)


def _measurements(connection: Connection, run_id: str) -> dict[int, dict[int, Measurement]]:
    """Return measurements by attempt id and position."""
    found: dict[int, dict[int, Measurement]] = {}
    series = schema.series.c
    for table in (schema.measurement, schema.counter):
        unpack = values.unpack_floats if table is schema.measurement else values.unpack_integers
        query = _of_run(table, run_id, series.metric, series.unit, series.direction, series.exact)
        for row in connection.execute(query.join(schema.series)):
            found.setdefault(row.attempt_id, {})[row.position] = Measurement(
                row.metric, row.unit, Direction(row.direction), unpack(row.samples), exact=row.exact
            )
    return found


class RunReader:
    """Runs and what is in them. Every method is one transaction and raises StoreError when the database refuses."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def latest_id(self) -> str | None:
        """Return the id of the run that began last, None when there is none."""
        with self._database.reading() as connection:
            return latest_run_id(connection)

    def resolve(self, ref: str) -> str:
        """Return the run id that `latest`, `latest~1` (the one before), an id or its unique beginning means.

        Raises UnknownNameError with the nearest id, UsageError where several ids begin so or none is that far back.
        """
        with self._database.reading() as connection:
            return resolve_run(connection, ref)

    def view(self, run_id: str) -> RunView:
        """Return all that is known of a run, and what its failed cases did elsewhere. Raises UnknownNameError."""
        from farm.store.queries import coverage

        with self._database.reading() as connection:
            return coverage.with_elsewhere(connection, run_view(connection, run_id))

    def artifacts(self, run_id: str, job_id: str | None = None) -> list[ArtifactRecord]:
        """Return the artifacts of a run, or of one of its jobs, oldest first."""
        with self._database.reading() as connection:
            return artifacts(connection, run_id, job_id)

    def planned_jobs(self, run_ids: Iterable[str], soc: str, backend: str) -> list[ListedJob]:
        """Return the jobs for a SoC and backend that runs were to do, in the order of the first run."""
        from farm.store.queries import coverage

        with self._database.reading() as connection:
            return coverage.planned_jobs(connection, run_ids, soc, backend)

    def verdicts(self, run_id: str) -> dict[str, LastVerdict]:
        """Return how the jobs of a run ended, by their ids, without those that have no verdict about their code."""
        from farm.store.queries import selection

        with self._database.reading() as connection:
            return selection.verdicts(connection, run_id)
