"""Stored nightly runs of a name, a file each, and the lock that excludes a second one at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from farm.base.atomic import write_atomically
from farm.base.errors import InfraError, UsageError
from farm.base.ids import is_run_id
from farm.dispatch.nightly.record import NightlyRun


def new_id() -> str:
    """Return the id of a nightly run that begins now, in the form of run ids: sorted by name is sorted by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder. Raises InfraError, for example for a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, durable=True)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror or error}") from None


class NightlyRuns:
    """Nightly runs of one name that are stored on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other nightly runs of this name during the block. Raises UsageError while one runs."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.folder / "lock").open("a+"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"the nightly run {self.folder.name!r} is running already (process {file.read(20) or 'unknown'}): "
                    "wait for it, or stop it with Ctrl-C or SIGTERM"
                ) from None
            except OSError as error:
                raise InfraError(f"cannot write {self.folder}: {error.strerror or error}") from None
            yield

    def save(self, nightly_run: NightlyRun) -> None:
        """Store the record of a nightly run. Raises InfraError."""
        write_whole(self.folder / f"{nightly_run.id}.json", msgspec.json.encode(nightly_run))

    def all(self) -> list[NightlyRun]:
        """Return all nightly runs, oldest first; unreadable files, as of another version of farm, are left out."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=NightlyRun))
            except (OSError, msgspec.DecodeError):
                continue
        # Ids are not ordered within a second.
        return sorted(found, key=lambda nightly_run: nightly_run.started_ms)

    def unfinished(self, digest: str) -> NightlyRun:
        """Return the newest nightly run if it is unfinished.

        Raises UsageError without an unfinished one, or if its requests (`digest`) were others.
        """
        newest = next(reversed(self.all()), None)
        if newest is None or (newest.is_done and not newest.is_unnotified):
            what = "is finished" if newest else "there is none yet"
            raise UsageError(f"--resume: the last run of {self.folder.name!r} {what}: leave --resume out for a new one"
                             if newest else f"--resume: {what} called {self.folder.name!r}")  # fmt: skip
        if newest.digest != digest:
            raise UsageError(
                f"--resume: {newest.id} was to run something else, as the file has changed since: start anew"
            )
        return newest

    def forget(self, keep: int, reports: Path) -> None:
        """Remove all but the newest `keep` nightly runs, with their pages below `reports`."""
        for path in sorted(self.folder.glob("*.json"))[:-keep]:
            if is_run_id(path.stem):
                shutil.rmtree(reports / path.stem, ignore_errors=True)
                path.unlink(missing_ok=True)
