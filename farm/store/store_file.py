"""Whether the file of an SQLite store is on a disk of this machine, and still the one that was opened.

SQLite itself goes on with one that is not.
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
    "was deleted or moved away while it was in use: put it back, or what was recorded in it is lost and the next run "
    "makes a new store"
)
_REPLACED = "was replaced while it was in use: what was recorded since is not in the file that is there now"
_LOG_DELETED = "its write-ahead log (-wal) was deleted or replaced while it was in use: what was recorded last is lost"
_OVERWRITTEN = (
    "was overwritten or cut off while it was in use: restore it from a backup, or move it away and start a new one "
    "(sqlite3 STORE .recover saves what can be read)"
)


# Their locks, and the memory that SQLite's processes share, do not reach from one machine to the next:
# https://www.sqlite.org/useovernet.html
_NETWORKED = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", "ceph", "glusterfs", "lustre",
    "beegfs", "gpfs", "pvfs2", "orangefs", "davfs", "moosefs", "juicefs",
})  # fmt: skip
_NETWORKED_BY_FUSE = frozenset({"sshfs", "s3fs", "rclone", "gcsfuse", "goofys", "curlftpfs", "cephfs", "mfs"})
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def network_kind(mountinfo: str, path: str) -> str:
    """Return the kind of the network file system that `path` is on, "" for one of this machine. Pure.

    `mountinfo` is what /proc/self/mountinfo says (proc_pid_mountinfo(5)), `path` is absolute and without links.
    """
    at, kind = "", ""
    for line in mountinfo.splitlines():
        before, mark, after = line.partition(" - ")
        fields = before.split(" ")
        if not mark or len(fields) < 5:
            continue
        place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        # Of several at one place the last one covers the others.
        if (path == place or path.startswith(f"{place}/")) and len(place) >= len(at):
            at, kind = place, after.split(" ")[0]
    return kind if kind.removeprefix("fuse.") in _NETWORKED | _NETWORKED_BY_FUSE else ""


def require_local(path: Path) -> None:
    """Raise NoStoreError where the file of a store is, or would be, on a network file system."""
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
    """What tells one file from another, whatever their names."""

    device: int
    inode: int


def identity(path: Path | str) -> Identity | None:
    """Return what file a path leads to, None where there is none."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - half the time, and every attempt asks
    except OSError:
        return None
    return Identity(stat.st_dev, stat.st_ino)


class StoreFile:
    """A file that SQLite has opened, and all that it takes to notice that it is another, or damaged."""

    def __init__(self, path: Path, *, content: bool) -> None:
        """`content`: also look whether it begins as a database does, each time that it has changed."""
        self._path, self._content = str(path), content
        try:
            stat = path.stat()
        except OSError:
            raise self._lost(_DELETED) from None
        self._identity = Identity(stat.st_dev, stat.st_ino)
        self._seen = stat.st_mtime_ns, stat.st_size

    def check(self) -> None:
        """Raise StoreLostError when the file is deleted, another one or, as far as its header tells, damaged."""
        try:
            stat = os.stat(self._path)  # noqa: PTH116
        except OSError:
            raise self._lost(_DELETED) from None
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise self._lost(_REPLACED)
        now = stat.st_mtime_ns, stat.st_size
        if self._content and now != self._seen:
            # Once in a few hundred attempts, when a checkpoint has written to it.
            if not self._is_sound(stat.st_size):
                raise self._lost(_OVERWRITTEN)
            self._seen = now

    def check_log(self, opened: Identity | None) -> None:
        """Raise StoreLostError when the write-ahead log is not the one that a connection has opened."""
        if opened is not None and identity(f"{self._path}-wal") != opened:
            # Nobody removes it while it is open, nor together with the file itself.
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
        # A checkpoint that goes on, or was killed, has written the header first: the rest is in the log then.
        return size >= needed or self._is_readable()

    def _is_readable(self) -> bool:
        with suppress(sqlite3.DatabaseError), closing(self._connect()) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        return False

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(self._path)}?mode=ro", uri=True)

    def _header(self) -> bytes | None:
        """Return how the file begins, None where that cannot be read."""
        try:
            return os.pread(_descriptor(self._path, self._identity), _HEADER_BYTES, 0)
        except OSError:
            return None

    def _lost(self, problem: str) -> StoreLostError:
        return StoreLostError(f"{self._path}: {problem}")


_lock = threading.Lock()
_descriptors: dict[Identity, int] = {}


def _descriptor(path: str, opened: Identity) -> int:
    """Return a descriptor of a store that stays open as long as this process.

    Closing any descriptor of a file drops all locks that the process has on it, SQLite's own among them: fcntl(2).
    """
    with _lock:
        if opened not in _descriptors:
            _descriptors[opened] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _descriptors[opened]
