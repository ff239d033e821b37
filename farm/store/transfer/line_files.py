"""Import of files by `farm data export`: every line of the untrusted file is checked before the first write."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from farm.base.errors import UsageError
from farm.store.transfer.lines import LAYOUT, LINE_LIMIT, AttemptLine, Head, JobLine, Line, RunLine, canonical, decode
from farm.store.transfer.runs import Transfer, another_run, digest_of


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
