"""Conversion of values to rows and details of attempts back, and insertion of rows: the steps of the store's
transactions.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection, Row, Table, select, update

from farm.base.errors import StoreLostError
from farm.base.grouping import grouped
from farm.devices.device import Device, common_kind
from farm.results.attempt import Attempt, Comparison, LayerComparison, Measurement, OperatorProfile, Verdict
from farm.store import schema, values
from farm.store.attempt_fields import ATTEMPT_FIELDS, DETAIL_FIELDS, columns_of
from farm.store.records import ArtifactRecord, BuildRecord, LastVerdict, RunKind, RunRecord, SkipReason
from farm.store.statements import KEYS, in_parts, statement, struct_of
from farm.suites.suite import Job

# Rows <-> the details of an attempt. SQLite stores NaN as NULL: this module defines the meaning of each NULL.


_T = TypeVar("_T", bound=msgspec.Struct)


def bounded(attempt: Attempt) -> Attempt:
    """Return the attempt within the store's limits of rows and text lengths, in characters that both databases hold."""
    return msgspec.structs.replace(
        attempt,
        **{name: field.bounded(getattr(attempt, name)) for name, field in ATTEMPT_FIELDS.items()},
        device=values.clean(attempt.device, values.NAME_LIMIT),
        comparisons=_bounded(attempt.comparisons),
        measurements=tuple(
            msgspec.structs.replace(
                one,
                metric=values.clean(one.metric, values.METRIC_LIMIT),
                unit=values.clean(one.unit, values.UNIT_LIMIT),
            )
            for one in attempt.measurements
        ),
        operators=_bounded(attempt.operators[: values.OPERATORS_LIMIT]),
        layers=_bounded(attempt.layers[: values.LAYERS_LIMIT]),
    )


def _bounded(details: tuple[_T, ...]) -> tuple[_T, ...]:
    kinds = {name: field.kind.bounded for name, field in DETAIL_FIELDS[type(details[0])].items()} if details else {}
    texts = [(name, bound) for name, bound in kinds.items() if bound is not None]
    return tuple(
        msgspec.structs.replace(one, **{name: bound(getattr(one, name)) for name, bound in texts}) for one in details
    )


def detail_rows(
    attempt_id: int, details: Sequence[Comparison | OperatorProfile | LayerComparison]
) -> list[dict[str, Any]]:
    """Return the rows of details of an attempt."""
    columns = [field.column_name for field in DETAIL_FIELDS[type(details[0])].values()] if details else []
    rows = []
    for position, one in enumerate(details):
        row: dict[str, Any] = dict(zip(columns, msgspec.structs.astuple(one), strict=True))
        nan = [name for name, value in row.items() if isinstance(value, float) and math.isnan(value)]
        row |= {**dict.fromkeys(nan), "attempt_id": attempt_id, "position": position}
        if not isinstance(one, OperatorProfile):
            # NULL alone means "does not apply".
            row["nan_figures"] = nan
        rows.append(row)
    return rows


def operators_of(rows: Iterable[Sequence[Any]]) -> dict[int, list[OperatorProfile]]:
    """Return profiles by attempt id; `rows` are ordered by position."""
    found: dict[int, list[OperatorProfile]] = {}
    # Unpacked, which is quicker than by name: a run may have a hundred thousand rows.
    for attempt_id, node, delegate, unit, n, p50, least, greatest, share, module, source in rows:
        if None in (p50, least, greatest, share):
            p50, least, greatest, share = (  # noqa: PLW2901 - here, NULL can only have been NaN
                math.nan if time is None else time for time in (p50, least, greatest, share)
            )
        row = OperatorProfile(node, delegate, unit, n, p50, least, greatest, share, module, source)
        found.setdefault(attempt_id, []).append(row)
    return found


def details_of(kind: type[_T], rows: Iterable[Row[Any]]) -> dict[int, list[_T]]:
    """Return comparisons of a kind, of outputs or layers, by attempt id; `rows` are ordered by position."""
    columns = [(name, field.column_name) for name, field in DETAIL_FIELDS[kind].items()]

    def detail(row: Row[Any]) -> _T:
        facts = {name: getattr(row, column) for name, column in columns}
        return msgspec.convert(facts | dict.fromkeys(row.nan_figures, math.nan), kind, strict=False)

    return grouped((row.attempt_id, detail(row)) for row in rows)


def verdict_of(row: Row[Any]) -> LastVerdict:
    """Return the verdict of a row of `run_job` with the attempt that decides it."""
    known = row.verdict == Verdict.FAILED and row.known_issue
    return struct_of(LastVerdict, row, outcome="known issue" if known else row.verdict)


def device_facts(build: str | None, runtime: Mapping[str, str] | None) -> dict[str, str]:
    """Return the conditions of numbers besides the run's fingerprint, name to value."""
    facts = dict(runtime or {})
    if "runner" in facts:
        # The device's own runner replaces the runner of the host.
        facts["native_runner"] = facts.pop("runner")
    return facts | ({"device_build": build} if build else {})


def fingerprints(connection: Connection, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return fingerprints by their hash."""
    rows = in_parts(connection, statement("history.fingerprints"), sorted(set(hashes)))
    return {row.hash: row.facts for row in rows}


# Conversion of values to rows, and insertion of rows: the steps of the store's transactions.


_SeriesKey = tuple[str, str, str, bool]
_SERIES_KEY = ("metric", "unit", "direction", "exact")


def now_ms() -> int:
    """Return the time; epoch, milliseconds."""
    return time.time_ns() // 1_000_000


def new_run_id(started_ms: int) -> str:
    """Return an id that sorts by time, to the second, with a random part against equal ids of other machines."""
    return values.run_id_time(started_ms) + secrets.token_hex(3)


def run_columns(connection: Connection, record: RunRecord) -> dict[str, Any]:
    """Insert the fingerprint of a new run, and return the columns of its row without id and end."""
    facts = {values.clean(name): values.clean(value) for name, value in record.fingerprint.items()}
    device_kind = facts.get("device_kind")
    return {
        "command": values.clean(record.command, values.LOG_LIMIT),
        "user_name": values.clean(record.user),
        "host": values.clean(record.host),
        "fingerprint_hash": _insert_fingerprint(connection, facts),
        "started_ms": record.started_ms,
        "priority": values.clean(record.priority, values.KIND_LIMIT),
        "run_kind": RunKind.of(record.command, facts),
        "run_device_kind": None if device_kind is None else values.clean(device_kind, values.KIND_LIMIT),
        **values.toolchain_columns(record.toolchain),
        "run_name": values.clean(record.name, values.NAME_LIMIT),
        "run_nightly": values.clean(record.nightly_run, values.SOC_LIMIT),
    }


def _insert_fingerprint(connection: Connection, facts: Mapping[str, str]) -> str:
    """Insert a fingerprint, if it is missing, and return its hash."""
    key = values.fingerprint_hash(facts)
    insert_missing(connection, schema.fingerprint, [{"hash": key, "facts": facts}])
    return key


def require_run(connection: Connection, run_id: str) -> None:
    """Raise StoreLostError for a run that is not in the store."""
    branch_of_run(connection, run_id)


def branch_of_run(connection: Connection, run_id: str) -> tuple[str, bool]:
    """Return the branch that a run belongs to or is compared with, and True for a local run. Raises StoreLostError."""
    run = schema.run.c
    found = connection.execute(select(run.run_branch, run.run_private).where(run.id == run_id)).first()
    if found is None:
        raise StoreLostError(f"run {run_id} is not in the store: begin_run makes one")
    return found[0], found[1]


def planned_jobs(connection: Connection, run_id: str, job_ids: Collection[str]) -> dict[str, int]:
    """Return the ids of the rows in `run_job` by job id. Raises StoreLostError for a job that is not planned."""
    job, planned = schema.job.c, schema.run_job.c
    of_run = (planned.run_id == run_id, planned.job_id == job.id)
    query = select(job.name, planned.id).where(*of_run, job.name.in_(KEYS))
    found: dict[str, int] = {row.name: row.id for row in in_parts(connection, query, job_ids)}
    for job_id in job_ids:
        if job_id not in found:
            raise _not_planned(run_id, job_id)
    return found


def _not_planned(run_id: str, job_id: str) -> StoreLostError:
    return StoreLostError(f"run {run_id} has no job {job_id}: plan_jobs makes its jobs known")


def insert_jobs(
    connection: Connection, jobs: Sequence[Job], versions: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Insert new jobs and cases; return the row ids of both by job id.

    `versions` has the version of each job's case, by job id.
    """
    # All writers insert in the same order: two of them never wait for each other.
    ordered = sorted(jobs, key=lambda job: job.id)
    insert_missing(connection, schema.job, [_job_row(job) for job in ordered])
    key_of = {job.id: (job.case.suite, values.case_column(job.case.name), versions[job.id]) for job in ordered}
    cases = {key_of[job.id]: job.case.module for job in ordered}
    names = ("suite", "case_name", "version")
    rows = [{**dict(zip(names, key, strict=True)), "module": module} for key, module in sorted(cases.items())]
    insert_missing(connection, schema.suite_case, rows)

    job, case = schema.job.c, schema.suite_case.c
    found = in_parts(connection, select(job.name, job.id).where(job.name.in_(KEYS)), [job.id for job in jobs])
    job_ids = {row.name: row.id for row in found}
    of_versions = select(schema.suite_case).where(case.version.in_(KEYS))
    found = in_parts(connection, of_versions, {version for _, _, version in cases})
    row_of = {(row.suite, row.case_name, row.version): row.id for row in found}
    return job_ids, {job.id: row_of[key_of[job.id]] for job in jobs}


def insert_device(connection: Connection, run_id: str, device: Device, runtime: Mapping[str, str] | None = None) -> int:
    """Insert a device of a run with the versions of its runtime, and return its row id."""
    row = fitted(schema.device, serial=device.serial, soc=device.soc, kind=device.kind, build=device.build)
    if device.soc_reported:
        runtime = {**(runtime or {}), "soc_reported": device.soc_reported}
    facts = runtime and {values.clean(name): values.clean(value) for name, value in runtime.items()}
    device_id = insert_device_row(connection, run_id, row, facts or None)
    _settle_device_kind(connection, run_id)
    return device_id


def _settle_device_kind(connection: Connection, run_id: str) -> None:
    """Update the kind of device of a run, and its fingerprint, from its devices; MIXED for devices of both kinds."""
    run, device, had = schema.run, schema.device, schema.run_device
    asked = select(run.c.run_device_kind, schema.fingerprint.c.facts).join(schema.fingerprint)
    asked_kind, facts = connection.execute(asked.where(run.c.id == run_id)).one()
    kinds = select(device.c.kind).join(had).where(had.c.run_id == run_id).distinct()
    kind = common_kind(connection.scalars(kinds))
    if asked_kind is None or kind in ("", asked_kind):
        return
    key = _insert_fingerprint(connection, {**facts, "device_kind": kind})
    settled = update(run).where(run.c.id == run_id).values(fingerprint_hash=key, run_device_kind=kind)
    connection.execute(settled)


def insert_device_row(
    connection: Connection, run_id: str, row: Mapping[str, str], runtime: Mapping[str, str] | None = None
) -> int:
    """Insert a device of a run, with the columns `row`, and return its row id."""
    insert_missing(connection, schema.device, [row])
    query = select(schema.device.c.id).where(*(schema.device.c[name] == value for name, value in row.items()))
    device_id: int = connection.execute(query).scalar_one()
    insert_missing(connection, schema.run_device, [{"run_id": run_id, "device_id": device_id, "runtime": runtime}])
    return device_id


class NewAttempt(NamedTuple):
    """Attempt to insert, with its artifacts."""

    row: Mapping[str, Any]
    """Columns beside the content of the attempt: `run_job_id`, `digest`, `device_id`, `recorded_ms`."""
    job_row_id: int
    attempt: Attempt
    artifacts: Sequence[ArtifactRecord]


def insert_attempts(
    connection: Connection,
    run_id: str,
    attempts: Sequence[tuple[Attempt, Sequence[ArtifactRecord]]],
    devices: Mapping[str, int] | None = None,
) -> None:
    """Insert attempts of a run with all their numbers and artifacts; recorded ones stay as they are.

    `devices` has row ids of devices by serial; all others are found, or inserted as unknown ones. Twenty attempts take
    as many statements as one. Raises StoreLostError for a job that is not planned.
    """
    if not attempts:
        return
    planned: dict[str, tuple[int, int]] = {}
    series: dict[int, dict[_SeriesKey, int]] = {}
    asked = {"run": run_id, "jobs": sorted({attempt.job_id for attempt, _ in attempts})}
    for row in connection.execute(statement("recording.planned"), asked):
        planned[row.job_name] = row.run_job_id, row.job_id
        if row.series_id is not None:
            key = row.metric, row.unit, row.direction, row.exact
            series.setdefault(row.job_id, {})[key] = row.series_id
    device_ids = dict(devices or {})
    if serials := sorted({attempt.device for attempt, _ in attempts} - {"", *device_ids}):
        found = connection.execute(statement("recording.devices"), {"run": run_id, "serials": serials})
        device_ids.update((row.serial, row.id) for row in found)
    new = []
    for attempt, artifacts in attempts:
        if attempt.job_id not in planned:
            raise _not_planned(run_id, attempt.job_id)
        if attempt.device and attempt.device not in device_ids:
            device_ids[attempt.device] = _insert_unknown_device(connection, run_id, attempt)
        run_job_id, job_row_id = planned[attempt.job_id]
        # Without a start time, two attempts with equal content may still be different attempts.
        digest = values.attempt_digest(attempt) if attempt.started_ms else None
        device_id = device_ids.get(attempt.device)
        columns = {"run_job_id": run_job_id, "digest": digest, "device_id": device_id, "recorded_ms": now_ms()}
        new.append(NewAttempt(columns, job_row_id, attempt, artifacts))
    # Rows that an insertion returns are matched with attempts by digest, so that an attempt without one goes alone.
    for batch in [new] if all(one.row["digest"] for one in new) else [[one] for one in new]:
        insert_attempt_rows(connection, batch, series)


def insert_attempt_rows(
    connection: Connection, attempts: Sequence[NewAttempt], series: dict[int, dict[_SeriesKey, int]] | None = None
) -> None:
    """Insert attempts with their numbers and artifacts; one with the job, run and digest of a recorded one is left out.

    `series` has known ids of series by row id of their job.
    """
    once = {(one.row["run_job_id"], one.row["digest"]): one for one in attempts}
    contents = [{**one.row, **columns_of(one.attempt)} for one in once.values()]
    known = {} if series is None else series
    details: dict[Table, list[dict[str, Any]]] = {
        table: [] for table in (schema.comparison, schema.measurement, schema.counter, schema.op_profile, schema.layer)
    }
    artifacts = []
    inserting = _inserting(schema.attempt, connection.dialect.name, "id", "run_job_id", "digest")
    for attempt_id, run_job_id, digest in connection.execute(inserting, contents).all():
        _, job_row_id, attempt, files = once[run_job_id, digest]
        keys = [(row.metric, row.unit, str(row.direction), row.exact) for row in attempt.measurements]
        if not known.get(job_row_id, {}).keys() >= set(keys):
            known[job_row_id] = _series_ids(connection, job_row_id, keys)
        for position, (key, measurement) in enumerate(zip(keys, attempt.measurements, strict=True)):
            place = {"attempt_id": attempt_id, "position": position, "series_id": known[job_row_id][key]}
            table, row = _measurement_row(measurement)
            details[table].append(place | row)
        details[schema.comparison] += detail_rows(attempt_id, attempt.comparisons)
        details[schema.op_profile] += detail_rows(attempt_id, attempt.operators)
        details[schema.layer] += detail_rows(attempt_id, attempt.layers)
        artifacts += [
            fitted(schema.artifact, attempt_id=attempt_id, sha256=file.sha256, size=file.size, kind=file.kind)
            for file in files
        ]
    for table, rows in details.items():
        if rows:
            connection.execute(table.insert(), rows)
    insert_missing(connection, schema.artifact, artifacts)


def plan_rows(connection: Connection, run_id: str, jobs: Sequence[Job], versions: Mapping[str, str]) -> None:
    """Write the rows of `Store.plan_jobs`; `versions` has the version of each job's case, by job id."""
    require_run(connection, run_id)
    job_ids, case_ids = insert_jobs(connection, jobs, versions)
    planned = [
        {
            "run_id": run_id,
            "job_id": job_ids[job.id],
            "case_id": case_ids[job.id],
            "position": position,
            "judged_by": values.judged_by(job),
        }
        for position, job in enumerate(jobs)
    ]
    insert_missing(connection, schema.run_job, planned)
    run = schema.run.c
    connection.execute(update(schema.run).where(run.id == run_id, ~run.run_began).values(run_began=True))


def mark_skipped_rows(connection: Connection, run_id: str, skipped: Mapping[str, SkipReason | None]) -> None:
    """Write the columns of `Store.mark_skipped`."""
    planned = planned_jobs(connection, run_id, skipped)
    for job_id, why in skipped.items():
        kept = None if why is None else msgspec.structs.replace(why, reason=values.clean(why.reason))
        row = update(schema.run_job).where(schema.run_job.c.id == planned[job_id])
        connection.execute(row.values(skipped=msgspec.to_builtins(kept)))


def build_columns(build: BuildRecord) -> dict[str, Any]:
    """Return the columns of a planned job about the build of its bundle; unknown ones are left out."""
    row: dict[str, Any] = {
        "build_seconds": build.seconds,
        "cached": build.cached,
        "bundle_key": values.clean(build.bundle_key, values.KEY_LIMIT),
        "program_hash": values.clean(build.program, values.SOC_LIMIT) or None,
    }
    for column, counts in (("fallback_ops", build.fallback_ops), ("operators", build.operators)):
        if counts is not None:
            row[column] = {values.clean(name): count for name, count in counts.items()}
    return row


def case_versions(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the version of the case of each job, by job id; code and files are read once, not per job."""
    from farm.builds.bundles.key import source_digest, source_place

    sources: dict[tuple[str, ...], str] = {}
    versions = {}
    for job in jobs:
        where = source_place(job.case)
        if where not in sources:
            sources[where] = source_digest(job.case)
        versions[job.id] = values.case_version(job.case, sources[where])
    return versions


def fitted(table: Table, **columns: Any) -> dict[str, Any]:
    """Return columns of a row with their texts in the width of the table, or within the limit of reasons."""
    widths = {name: getattr(table.c[name].type, "length", None) or values.REASON_LIMIT for name in columns}
    return {
        name: values.clean(value, widths[name]) if isinstance(value, str) else value for name, value in columns.items()
    }


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the missing rows; several writers may do so at once."""
    if rows:
        connection.execute(_inserting(table, connection.dialect.name), rows)


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any]) -> Any:
    """Insert a row and return its key; None for a row that exists already."""
    # RETURNING instead of the row count, which PostgreSQL's driver does not report here.
    statement = _inserting(table, connection.dialect.name, *table.primary_key.columns.keys())
    return connection.execute(statement, row).scalar()


def _job_row(job: Job) -> dict[str, Any]:
    return {
        "name": job.id,
        "suite": job.case.suite,
        "case_name": values.case_column(job.case.name),
        "soc": job.target.soc,
        "backend": job.target.backend,
        "precision": job.target.precision,
        "options": dict(job.target.options),
    }


def _insert_unknown_device(connection: Connection, run_id: str, attempt: Attempt) -> int:
    # The attempt must not be lost for missing facts about its device; `unknown` is compared with neither kind.
    soc = connection.execute(select(schema.job.c.soc).where(schema.job.c.name == attempt.job_id)).scalar_one()
    row = {"serial": attempt.device, "soc": soc, "kind": "unknown", "build": ""}
    return insert_device_row(connection, run_id, row)


def _measurement_row(measurement: Measurement) -> tuple[Table, dict[str, Any]]:
    """Return the table for a measurement, `counter` for integers of an exact metric, and its columns."""
    samples = measurement.samples
    exact = values.as_integers(samples) if measurement.exact else None
    if exact is None:
        statistics = values.statistics_of(samples)
        return schema.measurement, {"n": len(samples), **statistics, "samples": values.pack_floats(samples)}
    median = sorted(exact)[(len(exact) - 1) // 2]
    packed = values.pack_integers(exact)
    return schema.counter, {"n": len(samples), "value": median, "max": max(exact), "samples": packed}


def _series_ids(connection: Connection, job_row_id: int, keys: Sequence[_SeriesKey]) -> dict[_SeriesKey, int]:
    """Return the ids of series of a job; new series are inserted."""

    def known() -> dict[_SeriesKey, int]:
        rows = connection.execute(statement("recording.series"), {"job": job_row_id})
        return {(metric, unit, direction, exact): found for found, metric, unit, direction, exact in rows}

    ids = known()
    missing = sorted(set(keys) - ids.keys())
    if missing:
        rows = [{"job_id": job_row_id, **dict(zip(_SERIES_KEY, key, strict=True))} for key in missing]
        insert_missing(connection, schema.series, rows)
        ids = known()
    return ids


# Cached: an attempt needs such statements.
@functools.cache
def _inserting(table: Table, dialect: str, *returned: str) -> Any:
    """Return the statement that inserts missing rows, and returns these columns of them."""
    # Importing an unused dialect would take as long as opening the store.
    insert: Callable[[Table], Any] = import_module(f"sqlalchemy.dialects.{dialect}").insert
    statement = insert(table).on_conflict_do_nothing()
    return statement.returning(*(table.c[name] for name in returned)) if returned else statement
