"""Export of runs and import into another store, as lines of JSON in the layout of `farm.store.transfer.lines`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, select

from farm import __version__
from farm.base.errors import UsageError
from farm.base.exit_codes import ENDED_EARLY
from farm.results.attempt import Attempt
from farm.store import rows, schema, values
from farm.store.queries.runs import attempts_of, devices_of, jobs_of
from farm.store.records import ArtifactRecord
from farm.store.statements import statement, struct_of
from farm.store.toolchains import toolchain_columns, toolchain_of
from farm.store.transfer.lines import LAYOUT, AttemptLine, Head, JobLine, Line, RunLine, encode
from farm.store.view import RunToolchain, SkipReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from farm.store.database import Database


class TransferableRun(msgspec.Struct, frozen=True):
    """Run with the facts to choose it for an export."""

    id: str
    finished: bool


class Transfer:
    """Runs of a store as lines; every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def runs(self, since_ms: int = 0) -> list[TransferableRun]:
        """Return the runs that began at a time or later (epoch, milliseconds), oldest first."""
        run = schema.run.c
        query = select(run.id, run.finished_ms).where(run.started_ms >= since_ms).order_by(run.started_ms, run.id)
        with self._database.reading() as connection:
            return [TransferableRun(row.id, row.finished_ms is not None) for row in connection.execute(query)]

    def export(self, run_ids: Iterable[str]) -> Iterator[bytes]:
        """Yield runs as lines with line ends; a single run at a time is in memory, without an open transaction."""
        yield encode(Head, {"layout": LAYOUT, "farm": __version__}) + b"\n"
        for run_id in run_ids:
            # A reader of the lines may be slow, or stop; a transaction must not wait for it.
            for line in _lines(self._recorded(run_id)):
                yield line + b"\n"

    def digest(self, run_id: str) -> str:
        """Return the digest of the lines of a run; empty for an unknown run."""
        return digest_of(_lines(self._recorded(run_id)))

    def _recorded(self, run_id: str) -> _RecordedRun | None:
        with self._database.reading() as connection:
            return _read(connection, run_id)

    def add(self, read: Callable[[], Iterable[Line]], digest: str) -> bool:
        """Insert a run from the lines of `read`, with their `digest`; return False if the store has it already.

        Raises UsageError, without an insertion, if the store has another run of this id, or has a job or case of the
        lines with other facts.
        """

        # Lines are read before the transaction, which PostgreSQL would end while it is idle.
        run, *lines = read()
        assert isinstance(run, RunLine)  # noqa: S101 - a slip of ours, not of the file

        def insert(connection: Connection) -> bool:
            if not _insert_run(connection, run):
                if _digest_within(connection, run.id) != digest:
                    raise UsageError(another_run(run.id))
                return False
            _insert_lines(connection, run, iter(lines))
            # The inserted run has to export to the same lines, also for a hostile file: else it is rolled back.
            if _digest_within(connection, run.id) != digest:
                raise UsageError(
                    f"run {run.id}: the store has a job or case of this name with other content: not imported"
                )
            return True

        return self._database.write(insert)


def another_run(run_id: str) -> str:
    """Return the message for a run that cannot be imported because another run has its id."""
    return f"run {run_id}: the store has another run of this id, or another state of this one: not imported"


def digest_of(lines: Iterable[bytes]) -> str:
    """Return the digest of a run over its lines in the form of an export; empty without lines."""
    digest, found = hashlib.sha256(), False
    for line in lines:
        digest.update(line + b"\n")
        found = True
    return digest.hexdigest() if found else ""


class _RecordedRun(NamedTuple):
    """Rows of a run, encoded as lines after the end of the transaction."""

    run: Row[Any]
    attempts: list[tuple[Row[Any], Attempt]]
    devices: Sequence[Row[Any]]
    jobs: Sequence[Row[Any]]
    artifacts: Sequence[Row[Any]]


def _read(connection: Connection, run_id: str) -> _RecordedRun | None:
    run = connection.execute(statement("runs.run"), {"run": run_id}).first()
    if run is None:
        return None
    return _RecordedRun(
        run,
        attempts_of(connection, run_id),
        devices_of(connection, run_id),
        jobs_of(connection, run_id),
        connection.execute(statement("runs.artifacts"), {"run": run_id, "job": 0}).all(),
    )


def _digest_within(connection: Connection, run_id: str) -> str:
    """Return the digest of the lines of a run within a transaction, and keep the transaction alive."""

    def lines() -> Iterator[bytes]:
        for line in _lines(_read(connection, run_id)):
            # PostgreSQL ends a transaction without a statement for some seconds, and lines of a long run take longer.
            connection.exec_driver_sql("SELECT 1")
            yield line

    return digest_of(lines())


def _lines(recorded: _RecordedRun | None) -> Iterator[bytes]:
    if recorded is None:
        return
    run, attempts, devices, jobs, rows_of_artifacts = recorded
    facts = {
        **run._mapping,  # noqa: SLF001 - public in SQLAlchemy
        "user": run.user_name,
        "fingerprint": run.facts,
        "devices": [
            {**{name: getattr(row, name) for name in _DEVICE}, "runtime": row.runtime or {}} for row in devices
        ],
        "jobs": len(jobs),
        "attempts": len(attempts),
        "toolchain": toolchain_of(run) or None,
        "name": run.run_name or None,
        "nightly_run": run.run_nightly or None,
    }
    yield encode(RunLine, facts)
    for job in jobs:
        skipped = msgspec.to_builtins(msgspec.convert(job.skipped, SkipReason | None))
        named = {"id": job.name, "case": values.case_of(job.name), "skipped": skipped}
        facts = {**job._mapping, **named}  # noqa: SLF001 - as above
        yield encode(JobLine, facts)
    places = {row.id: place for place, row in enumerate(devices)}
    artifacts: dict[int, list[ArtifactRecord]] = {}
    for row in rows_of_artifacts:
        artifacts.setdefault(row.attempt_id, []).append(struct_of(ArtifactRecord, row))
    for row, attempt in attempts:
        facts = {
            **msgspec.structs.asdict(attempt),
            "job": attempt.job_id,
            "device": None if row.device_id is None else places[row.device_id],
            "recorded_ms": row.recorded_ms,
            "digest": row.digest,
            "artifacts": artifacts.get(row.id, ()),
        }
        yield encode(AttemptLine, facts)


_DEVICE = ("serial", "soc", "kind", "build")


def _insert_run(connection: Connection, run: RunLine) -> bool:
    """Insert a run; return False if the store has a run of its id."""
    facts_hash = values.fingerprint_hash(run.fingerprint)
    rows.insert_missing(connection, schema.fingerprint, [{"hash": facts_hash, "facts": run.fingerprint}])
    row = {
        "id": run.id,
        "command": run.command,
        "user_name": run.user,
        "host": run.host,
        "fingerprint_hash": facts_hash,
        "started_ms": run.started_ms,
        "finished_ms": run.finished_ms,
        "exit_code": run.exit_code,
        "priority": run.priority,
        **rows.run_kinds(run.command, run.fingerprint),
        **toolchain_columns(RunToolchain() if run.toolchain is None else run.toolchain.toolchain),
        "run_name": run.name or "",
        "run_nightly": run.nightly_run or "",
        "run_began": run.exit_code not in ENDED_EARLY or run.attempts > 0,
    }
    return rows.insert_new(connection, schema.run, row) is not None


def _insert_lines(connection: Connection, run: RunLine, lines: Iterator[Line]) -> None:
    devices = [
        rows.insert_device_row(
            connection, run.id, {name: getattr(device, name) for name in _DEVICE}, device.runtime or None
        )
        for device in run.devices
    ]
    row_ids = _insert_jobs(connection, run.id, [next(lines) for _ in range(run.jobs)])
    for line in lines:
        assert isinstance(line, AttemptLine)  # noqa: S101 - a slip of ours, not of the file
        run_job_id, job_row_id = row_ids[line.job]
        known = {
            "run_job_id": run_job_id,
            "digest": line.digest,
            "device_id": None if line.device is None else devices[line.device],
            "recorded_ms": line.recorded_ms,
        }
        new = rows.NewAttempt(known, job_row_id, line.attempt(run.devices), line.kept)
        rows.insert_attempt_rows(connection, [new])


def _insert_jobs(connection: Connection, run_id: str, lines: list[Line]) -> dict[str, tuple[int, int]]:
    """Insert the planned jobs of a run; return the ids of the rows in `run_job` and `job` by job id."""
    planned = [line for line in lines if isinstance(line, JobLine)]
    jobs = [line.job for line in planned]
    job_ids, case_ids = rows.insert_jobs(connection, jobs, {line.id: line.version for line in planned})
    for line in planned:
        row = {"run_id": run_id, "job_id": job_ids[line.id], "case_id": case_ids[line.id], "position": line.position}
        connection.execute(schema.run_job.insert(), {**row, **line.row})
    run_job = schema.run_job.c
    found = connection.execute(select(run_job.job_id, run_job.id).where(run_job.run_id == run_id))
    by_job = {row.job_id: row.id for row in found}
    return {line.id: (by_job[job_ids[line.id]], job_ids[line.id]) for line in planned}
