"""Export of runs, as lines of JSON, and of artifacts as files; import of runs whose every line is checked before a
write.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, select

from farm import __version__
from farm.base.errors import ENDED_EARLY, UsageError
from farm.base.files import replacing
from farm.base.grouping import grouped
from farm.results.attempt import Attempt
from farm.store import rows, schema, values
from farm.store.artifacts import ArtifactStore
from farm.store.queries.runs import attempts_of, devices_of, jobs_of
from farm.store.records import ArtifactRecord, SkipReason
from farm.store.statements import Group, statement, struct_of
from farm.store.transfer.lines import (
    LAYOUT,
    LINE_LIMIT,
    AttemptLine,
    Head,
    JobLine,
    Line,
    RunLine,
    canonical,
    decode,
    encode,
)

# Export of runs and import into another store, as lines of JSON in the layout of `farm.store.transfer.lines`.


class TransferableRun(msgspec.Struct, frozen=True):
    """Run with the facts to choose it for an export."""

    id: str
    finished: bool


class Transfer(Group):
    """Runs of a store as lines; every method is one transaction."""

    def runs(self, since_ms: int = 0) -> list[TransferableRun]:
        """Return the runs that began at a time or later (epoch, milliseconds), oldest first."""
        run = schema.run.c
        query = select(run.id, run.finished_ms).where(run.started_ms >= since_ms).order_by(run.started_ms, run.id)
        return [TransferableRun(row.id, row.finished_ms is not None) for row in self._rows(query)]

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
        "toolchain": values.toolchain_of(run) or None,
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
    artifacts = grouped((row.attempt_id, struct_of(ArtifactRecord, row)) for row in rows_of_artifacts)
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
    row = {
        **rows.run_columns(connection, run.record),
        "id": run.id,
        "finished_ms": run.finished_ms,
        "exit_code": run.exit_code,
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


# Import of files by `farm data export`: every line of the untrusted file is checked before the first write.


class FoundRun(msgspec.Struct, frozen=True):
    """Run found in a file whose lines are all checked."""

    file: LineFile
    offset: int
    """Offset of the run's first line in the file, in bytes."""
    number: int
    """Number of that line, from 1."""
    layout: int
    """Layout of the export that has the run."""
    run: RunLine
    digest: str
    """Hash of the run's lines in canonical form, by which equal runs are recognized."""

    @property
    def place(self) -> str:
        """Place in the form FILE:LINE, for people."""
        return f"{self.file.name}:{self.number}"

    def lines(self) -> Iterator[Line]:
        """Read the lines of the run again, with all checks, since the file may have changed."""
        self.file.seek(self.offset, self.number, self.layout)
        return self.file.lines_of_run()


class LineFile:
    """File written by `farm data export`, or standard input for the name `-`."""

    def __init__(self, name: str) -> None:
        self.name = "standard input" if name == "-" else name
        try:
            self._file = _copied(sys.stdin.buffer) if name == "-" else _seekable(Path(name))
        except OSError as error:
            raise UsageError(f"{self.name}: cannot be read: {error.strerror}") from None
        # Place of the next line.
        self._offset, self._number = 0, 1
        self._layout = LAYOUT

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def seek(self, offset: int, number: int, layout: int) -> None:
        """Go to the line `number`, which begins at `offset`, in an export of a layout."""
        self._file.seek(offset)
        self._offset, self._number, self._layout = offset, number, layout

    def runs(self) -> list[FoundRun]:
        """Return the runs in the file. Raises UsageError, with the number of the line, for an invalid file."""
        found: list[FoundRun] = []
        if not isinstance(self._next(), Head):
            raise self._wrong("is no export of farm: 'farm data export --format jsonl' writes one")
        while True:
            offset, number = self._offset, self._number
            line = self._next()
            if line is None:
                return found
            if isinstance(line, Head):
                # The file is a concatenation of exports.
                continue
            if not isinstance(line, RunLine):
                raise self._wrong("belongs to no run: the line of a run comes before its jobs and attempts")
            self.seek(offset, number, self._layout)
            digest = digest_of(map(canonical, self.lines_of_run()))
            found.append(FoundRun(self, offset, number, self._layout, line, digest))

    def lines_of_run(self) -> Iterator[Line]:
        """Yield the lines of the run that begins at the current line. Raises UsageError for an unexpected line."""
        run = self._next()
        if not isinstance(run, RunLine):
            raise self._wrong("has changed since the check: another program writes to the file")
        known = {(one.serial, one.soc, one.kind, one.build) for one in run.devices}
        if len(known) < len(run.devices):
            raise self._wrong("has a device twice")
        yield run
        jobs: set[str] = set()
        for _ in range(run.jobs):
            job = self._next()
            if not isinstance(job, JobLine):
                raise self._wrong(f"{_ended(job)}: run {run.id} has {run.jobs} jobs, the file {len(jobs)} of them")
            if job.id in jobs:
                raise self._wrong(f"has the job {job.id} twice")
            jobs.add(job.id)
            yield job
        for count in range(run.attempts):
            attempt = self._next()
            if not isinstance(attempt, AttemptLine):
                has = f"run {run.id} has {run.attempts} attempts, the file {count} of them"
                raise self._wrong(f"{_ended(attempt)}: {has}")
            if attempt.job not in jobs:
                raise self._wrong(f"is an attempt of {attempt.job!r}, which is no job of run {run.id}")
            if attempt.device is not None and attempt.device >= len(run.devices):
                raise self._wrong(f"names device {attempt.device}, and run {run.id} has {len(run.devices)}, from 0")
            yield attempt

    def _next(self) -> Line | None:
        """Return the next line, decoded; None at the end."""
        data = self._file.readline(LINE_LIMIT + 2)
        if not data:
            return None
        self._offset += len(data)
        self._number += 1
        try:
            line = decode(data, self._layout)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        if isinstance(line, Head):
            self._layout = line.layout
        return line

    def _wrong(self, problem: str) -> UsageError:
        """Return an error about the line read last."""
        return UsageError(f"{self.name}:{max(1, self._number - 1)}: {problem}")


def runs_in(files: Iterable[LineFile]) -> list[FoundRun]:
    """Return the runs in files, oldest first, after a check of every line.

    Raises UsageError, with file and line number, for an invalid line and for a run with two different contents.
    """
    found: dict[str, FoundRun] = {}
    with _nothing_imported():
        for file in files:
            for run in file.runs():
                if found.setdefault(run.run.id, run).digest != run.digest:
                    raise UsageError(f"{run.place}: run {run.run.id} occurs twice with different content")
    return sorted(found.values(), key=lambda run: (run.run.started_ms, run.run.id))


def import_runs(transfer: Transfer, found: Sequence[FoundRun]) -> tuple[list[RunLine], list[RunLine]]:
    """Import runs; return the new runs, and the runs that the store had already.

    Raises UsageError, before the first import, for a run that differs from the store's run of the same id.
    """
    known = {run.run.id: transfer.digest(run.run.id) for run in found}
    with _nothing_imported():
        for run in found:
            if known[run.run.id] not in {"", run.digest}:
                raise UsageError(f"{run.place}: {another_run(run.run.id)}")
    added: list[RunLine] = []
    present: list[RunLine] = []
    for run in found:
        new = not known[run.run.id] and transfer.add(run.lines, run.digest)
        (added if new else present).append(run.run)
    return added, present


@contextmanager
def _nothing_imported() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}; nothing was imported") from None


def _ended(line: Line | None) -> str:
    return "is the last line" if line is None else "is another line"


def _seekable(path: Path) -> BinaryIO:
    file = path.open("rb")
    if file.seekable():
        return file
    with file:
        return _copied(file)


def _copied(source: BinaryIO) -> BinaryIO:
    # The file is read twice: for the check, and for the import.
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the LineFile
    shutil.copyfileobj(source, file)
    file.seek(0)
    return file


# Export of artifacts as files in a folder.


_NAMES = {"etdump": "etdump.etdp"}
_NAME_LIMIT = 120


def file_names(artifacts: Iterable[ArtifactRecord]) -> dict[str, ArtifactRecord]:
    """Return artifacts by unique file names: NAME of a kind `optrace:NAME`, without characters that lead elsewhere."""
    found: dict[str, ArtifactRecord] = {}
    for artifact in artifacts:
        prefix, _, named = artifact.kind.partition(":")
        wanted = re.sub(r"[^\w.+=-]", "_", named or _NAMES.get(prefix, prefix), flags=re.ASCII)
        wanted = wanted.lstrip(".")[:_NAME_LIMIT] or "file"
        name, number = wanted, 1
        while name in found:
            number += 1
            name = f"{number}-{wanted}"
        found[name] = artifact
    return found


def export(store: ArtifactStore, artifacts: Iterable[ArtifactRecord], folder: Path) -> list[Path]:
    """Write artifacts into `folder`, made if missing, and return their paths; a file is there whole or not at all.

    Raises UsageError for an existing file or a folder without write access; StoreError for an artifact that is not in
    the store.
    """
    wanted = {folder / name: artifact for name, artifact in file_names(artifacts).items()}
    for path in wanted:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is there already: name another folder")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, artifact in wanted.items():
            with store.open(artifact.sha256) as source, replacing(path, durable=True) as target:
                shutil.copyfileobj(source, target)
            written.append(path)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    return written
