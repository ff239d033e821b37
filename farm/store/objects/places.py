"""Places of a shared farm's files over fsspec, and folders as such places: on this machine or behind SFTP."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fsspec.implementations.local import LocalFileSystem

from farm.base.errors import ArtifactsError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from farm.base.config.devices import SshLogin
    from farm.base.config.shared import ArtifactsAddress
    from farm.devices.ssh.link import SshLink


# Places of a shared farm's files, over fsspec: a folder of this machine, a folder behind SFTP, or a bucket of S3.
#
# Files in a place are whole: a file gets its name after its last byte. Errors come from the libraries beneath;
# `farm.store.objects.objects` distinguishes them.


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


# Folder with the files of a shared farm, on this machine (a mounted file system) or behind SFTP.


_READ_ONLY = 0o444
_CHUNK = 1 << 20
# Sessions of a process over one connection: OpenSSH allows 10 (MaxSessions).
_SFTP_SESSIONS = 4
_SFTP_SECONDS = 30.0


class Folder:
    """Folder on this machine or behind SFTP. Its root is never created: a missing root means a missing mount."""

    def __init__(self, address: ArtifactsAddress) -> None:
        self._root = address.path
        self._session: Callable[[], AbstractContextManager[Any]] = (
            partial(contextlib.nullcontext, _LocalFiles(skip_instance_cache=True))
            if address.login is None
            else _SftpSessions(address.login).one
        )

    def write(self, name: str, chunks: Iterable[bytes], check: Callable[[], None]) -> None:
        """Write a file whole, or not at all."""
        with self._session() as files:
            part = f"{self._root}/{INCOMING}/{name}.{os.urandom(6).hex()}"
            self._make_folder(files, INCOMING)
            try:
                with files.open(part, "wb") as file:
                    if hasattr(file, "set_pipelined"):
                        # SFTP waits for an answer to every 32 KiB without pipelining.
                        file.set_pipelined(True)
                    for chunk in chunks:
                        file.write(chunk)
                    file.flush()
                    if hasattr(file, "fileno"):
                        os.fsync(file.fileno())
                check()
                files.set_mode(part, _READ_ONLY)
                self._make_folder(files, name[:2])
                files.put_in_place(part, self._path(name))
            except BaseException:
                with contextlib.suppress(Exception):
                    files.rm_file(part)
                raise

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file. Raises FileNotFoundError."""
        with self._session() as files:
            path = self._path(name)
            try:
                file = files.open(path, "rb")
            except FileNotFoundError:
                self._require_root(files)
                raise
            with file:
                if hasattr(file, "prefetch"):
                    file.prefetch(files.info(path)["size"])
                while chunk := file.read(_CHUNK):
                    yield chunk

    def find(self, name: str) -> Stored | None:
        """Return a file; None if it is missing."""
        with self._session() as files:
            try:
                return stored(name, files.info(self._path(name)))
            except FileNotFoundError:
                self._require_root(files)
                return None

    def renew(self, name: str) -> bool:
        """Give a file the present time; return False if this user may not."""
        with self._session() as files:
            try:
                files.renew(self._path(name))
            except PermissionError:
                return False
            return True

    def all(self) -> Iterator[Stored]:
        """Yield every file."""
        with self._session() as files:
            self._require_root(files)
            folders = [one["name"] for one in files.ls(self._root, detail=True) if one["type"] == "directory"]
            for folder in folders:
                if len(folder.rpartition("/")[2]) == 2:
                    for one in files.ls(folder, detail=True):
                        yield stored(one["name"].rpartition("/")[2], one)

    def remove(self, name: str, still_old: Callable[[Stored], bool]) -> bool:
        """Remove a file unless it was written or renewed meanwhile."""
        path, taken = self._path(name), f"{self._root}/{INCOMING}/{name}.pruned.{os.urandom(6).hex()}"
        with self._session() as files:
            try:
                if not still_old(stored(name, files.info(path))):
                    return False
                self._make_folder(files, INCOMING)
                # From here on a process with the same content finds no file, and writes it anew.
                files.put_in_place(path, taken)
                if not still_old(stored(name, files.info(taken))):
                    # A process renewed the file between the first look and the renaming.
                    files.put_in_place(taken, path)
                    return False
                files.rm_file(taken)
            except (FileNotFoundError, PermissionError):
                return False
            return True

    def sweep(self) -> int:
        """Remove partially written files of dead processes, and return their number."""
        removed = 0
        with self._session() as files:
            try:
                left = files.ls(f"{self._root}/{INCOMING}", detail=True)
            except FileNotFoundError:
                return 0
            for one in left:
                if time.time() - modified_s(one) > LEFT_BEHIND_S:
                    with contextlib.suppress(OSError):
                        files.rm_file(one["name"])
                        removed += 1
        return removed

    def _path(self, name: str) -> str:
        return f"{self._root}/{path_of(name)}"

    def _require_root(self, files: Any) -> None:
        if not files.isdir(self._root):
            raise ArtifactsError(f"there is no folder {self._root}: mount it, or make it when you set up the farm")

    def _make_folder(self, files: Any, name: str) -> None:
        """Create a folder below the root with the root's permissions, so that other users can put files there."""
        folder = f"{self._root}/{name}"
        if files.isdir(folder):
            return
        self._require_root(files)
        try:
            files.make_folder(folder)
        except OSError:
            # A process may have created it at the same moment, for which SFTP has no separate error code.
            if not files.isdir(folder):
                raise
        with contextlib.suppress(PermissionError):  # another user made it at the same moment
            files.set_mode(folder, files.mode_of(self._root))


class _LocalFiles(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine, with what `CheckedSftp` adds to fsspec's as well."""

    def set_mode(self, path: str, mode: int) -> None:
        os.chmod(path, mode)  # noqa: PTH101 - text, as fsspec has it

    def mode_of(self, path: str) -> int:
        return os.stat(path).st_mode & 0o7777  # noqa: PTH116

    def make_folder(self, path: str) -> None:
        os.mkdir(path)  # noqa: PTH102

    def put_in_place(self, old: str, new: str) -> None:
        # fsspec copies a file if it cannot rename it, and other processes could see a partial copy.
        os.replace(old, new)  # noqa: PTH105
        folder = os.open(os.path.dirname(new), os.O_RDONLY)  # noqa: PTH120
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def renew(self, path: str) -> None:
        os.utime(path)


class _SftpSessions:
    """Pool of SFTP sessions over one connection, each for one thread at a time; a broken session is discarded."""

    def __init__(self, login: SshLogin) -> None:
        self._login = login
        self._link: SshLink | None = None
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        for _ in range(_SFTP_SESSIONS):
            self._idle.put(None)

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        files, broken = self._idle.get(), False
        try:
            files = files or self._connect()
            yield files
        except (FileNotFoundError, PermissionError, FileExistsError, GeneratorExit):
            raise
        except BaseException:
            broken = True
            raise
        finally:
            if broken and files is not None:
                with contextlib.suppress(Exception):
                    files.ftp.close()
            self._idle.put(None if broken else files)

    def _connect(self) -> Any:
        from farm.devices.ssh.config import ssh_address
        from farm.devices.ssh.link import SshLink
        from farm.store.objects.sftp import CheckedSftp

        self._link = self._link or SshLink("artifacts", ssh_address(self._login))
        return CheckedSftp(self._link, _SFTP_SECONDS)
