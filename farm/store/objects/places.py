"""Where a shared farm keeps its files, over fsspec: a folder of this machine, one behind SFTP, or a bucket of S3.

What is in a place is whole: a file gets its name when all of it is there. Errors are those of the libraries beneath;
`farm.store.objects.patience` tells them apart.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

INCOMING = "incoming"
"""Folder of a place with what is being written, beside the files themselves."""
LEFT_BEHIND_S = 24 * 3600.0
"""A file there that is as old was left by a process that died: far longer than any file takes."""


class Stored(NamedTuple):
    """One file of a place."""

    name: str
    nbytes: int
    modified_s: float
    """Epoch, on the clock of the place."""


class FilePlace(Protocol):
    """Where files are. Safe for several threads."""

    def write(self, name: str, chunks: Iterable[bytes], check: Callable[[], None]) -> None:
        """Write a file, which has its name once `check`, called when all was read, has raised nothing."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield what is in a file."""

    def find(self, name: str) -> Stored | None:
        """Return a file, None where it is not there; raises when the place itself is not there."""

    def renew(self, name: str) -> bool:
        """Make a file as young as a new one; return False where that is for its owner alone."""

    def all(self) -> Iterator[Stored]:
        """Yield every file."""

    def remove(self, name: str, still_old: Callable[[Stored], bool]) -> bool:
        """Remove a file unless it was written or renewed meanwhile; return whether it is gone."""

    def sweep(self) -> int:
        """Remove what was left half written, and return how many files that was."""


def path_of(name: str) -> str:
    """Return where a file is below the root of a place."""
    return f"{name[:2]}/{name}"


def stored(name: str, info: dict[str, Any]) -> Stored:
    """Return a file as fsspec tells of it."""
    return Stored(name, int(info["size"]), modified_s(info))


def modified_s(info: dict[str, Any]) -> float:
    """Return when a file was written, epoch."""
    when = info.get("mtime", info.get("LastModified"))
    return when.timestamp() if isinstance(when, datetime) else float(when or 0.0)
