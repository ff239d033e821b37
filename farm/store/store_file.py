"""Checks of an SQLite store's file: on a local disk, and still the opened file.

SQLite itself would go on after the file is replaced or deleted.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from farm.base.errors import NoStoreError, StoreLostError

# https://www.sqlite.org/fileformat2.html, "The Database Header"
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"

_DELETED = (
    "was deleted or moved away while it was in use: put it back, or its results are lost and the next run "
    "makes a new store"
)
_REPLACED = "was replaced while it was in use: later results are not in the new file"
_LOG_DELETED = "its write-ahead log (-wal) was deleted or replaced while it was in use: the last results are lost"
_OVERWRITTEN = (
    "was overwritten or cut off while it was in use: restore it from a backup, or move it away and start a new one "
    "(sqlite3 STORE .recover saves what can be read)"
)


# File systems whose locks, and whose shared memory for SQLite's processes, do not work between machines:
# https://www.sqlite.org/useovernet.html
_NETWORKED = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", "ceph", "glusterfs", "lustre",
    "beegfs", "gpfs", "pvfs2", "orangefs", "davfs", "moosefs", "juicefs",
})  # fmt: skip
_NETWORKED_BY_FUSE = frozenset({"sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "curlftpfs", "cephfs", "mfs"})
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def network_kind(mountinfo: str, path: str) -> str:
    """Return the kind of the network file system of `path`, "" for a local file system. Pure.

    `mountinfo` is the text of /proc/self/mountinfo (proc_pid_mountinfo(5)), `path` is absolute and without links.
    """
    at, kind = "", ""
    for line in mountinfo.splitlines():
        before, mark, after = line.partition(" - ")
        fields = before.split(" ")
        if not mark or len(fields) < 5:
            continue
        place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        # The last of several mounts at one place covers the others.
        if (path == place or path.startswith(f"{place}/")) and len(place) >= len(at):
            at, kind = place, after.split(" ")[0]
    return kind if kind.removeprefix("fuse.") in _NETWORKED | _NETWORKED_BY_FUSE else ""


def require_local(path: Path) -> None:
    """Raise NoStoreError if the file of a store, existing or new, is on a network file system."""
    try:
        mountinfo = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return  # macOS has none
    if kind := network_kind(mountinfo, os.path.realpath(path)):
        raise NoStoreError(
            f"{path}: is on a network file system ({kind}), where SQLite loses what several processes write: put it on "
            "a disk of this machine, or share a PostgreSQL: store = 'postgresql://user@host/database' "
            "(docs/explanation/leases.md)"
        )


class Identity(NamedTuple):
    """Device and inode: identity of a file independent of its name."""

    device: int
    inode: int


def identity(path: Path | str) -> Identity | None:
    """Return the identity of the file at a path, None for a missing file."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - half the time, and every attempt asks
    except OSError:
        return None
    return Identity(stat.st_dev, stat.st_ino)


class StoreFile:
    """Opened SQLite file, with checks against replacement and damage."""

    def __init__(self, path: Path, *, content: bool) -> None:
        """Remember the identity of the file; with `content`, `check` also reads the header after each change."""
        self._path, self._content = str(path), content
        try:
            stat = path.stat()
        except OSError:
            raise self._lost(_DELETED) from None
        self._identity = Identity(stat.st_dev, stat.st_ino)
        self._seen = stat.st_mtime_ns, stat.st_size

    def check(self) -> None:
        """Raise StoreLostError if the file is deleted, replaced or, according to its header, damaged."""
        try:
            stat = os.stat(self._path)  # noqa: PTH116
        except OSError:
            raise self._lost(_DELETED) from None
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise self._lost(_REPLACED)
        now = stat.st_mtime_ns, stat.st_size
        if self._content and now != self._seen:
            # A checkpoint changes the file once in a few hundred attempts.
            if not self._is_sound(stat.st_size):
                raise self._lost(_OVERWRITTEN)
            self._seen = now

    def check_log(self, opened: Identity | None) -> None:
        """Raise StoreLostError if the write-ahead log is another file than the one opened by a connection."""
        if opened is not None and identity(f"{self._path}-wal") != opened:
            # SQLite never removes an open log. If the whole store is gone, the file's own error comes first.
            self.check()
            raise self._lost(_LOG_DELETED)

    def _is_sound(self, size: int) -> bool:
        header = self._header()
        if header is None:
            return True
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            return False
        page = int.from_bytes(header[16:18], "big")
        needed = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
        # A running or killed checkpoint writes the header first: the missing pages are in the log then.
        return size >= needed or self._is_readable()

    def _is_readable(self) -> bool:
        with suppress(sqlite3.DatabaseError), closing(self._connect()) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        return False

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(self._path)}?mode=ro", uri=True)

    def _header(self) -> bytes | None:
        """Return the header of the file, None if it is unreadable."""
        try:
            return os.pread(_descriptor(self._path, self._identity), _HEADER_BYTES, 0)
        except OSError:
            return None

    def _lost(self, problem: str) -> StoreLostError:
        return StoreLostError(f"{self._path}: {problem}")


_lock = threading.Lock()
_descriptors: dict[Identity, int] = {}


def _descriptor(path: str, opened: Identity) -> int:
    """Return a descriptor of a store's file that stays open until this process ends.

    Closing any descriptor of a file drops all locks that the process has on it, SQLite's own among them: fcntl(2).
    """
    with _lock:
        if opened not in _descriptors:
            _descriptors[opened] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _descriptors[opened]
