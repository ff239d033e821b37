"""Places of a shared farm's files, over fsspec: a folder of this machine, a folder behind SFTP, or a bucket of S3.

Files in a place are whole: a file gets its name after its last byte. Errors come from the libraries beneath;
`farm.store.objects.objects` distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, Protocol

INCOMING = "incoming"
"""Folder of a place with files that are being written."""
LEFT_BEHIND_S = 24 * 3600.0
"""Age from which a file there belongs to a dead process: far longer than any file takes."""


class Stored(NamedTuple):
    """File of a place."""

    name: str
    nbytes: int
    modified_s: float
    """Time of the last change, epoch, on the clock of the place."""


class FilePlace(Protocol):
    """Place of files. Safe for several threads."""

    def write(self, name: str, chunks: Iterable[bytes], check: Callable[[], None]) -> None:
        """Write a file, which gets its name only after `check`, called behind the last chunk, returns."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file."""

    def find(self, name: str) -> Stored | None:
        """Return a file; None if it is missing. Raises for a missing place."""

    def renew(self, name: str) -> bool:
        """Give a file the present time; return False if only its owner may do that."""

    def all(self) -> Iterator[Stored]:
        """Yield every file."""

    def remove(self, name: str, still_old: Callable[[Stored], bool]) -> bool:
        """Remove a file unless it was written or renewed meanwhile; return whether it is gone."""

    def sweep(self) -> int:
        """Remove partially written files of dead processes, and return their number."""


def path_of(name: str) -> str:
    """Return the path of a file below the root of a place."""
    return f"{name[:2]}/{name}"


def stored(name: str, info: dict[str, Any]) -> Stored:
    """Return a file from fsspec's description `info`."""
    return Stored(name, int(info["size"]), modified_s(info))


def modified_s(info: dict[str, Any]) -> float:
    """Return the time of a file's last change, epoch."""
    when = info.get("mtime", info.get("LastModified"))
    return when.timestamp() if isinstance(when, datetime) else float(when or 0.0)
