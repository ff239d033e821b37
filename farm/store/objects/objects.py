"""Files of a shared farm by SHA-256, and their cache: bundles, runtimes, code of suites, artifacts of attempts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from farm.base.errors import (
    ArtifactLostError,
    ArtifactsError,
    DeviceError,
    DeviceGoneError,
    DeviceTimeoutError,
    FarmError,
    LocalError,
    MissingToolError,
    UsageError,
)
from farm.base.files import own_folder, published, sweep, sweep_own, withdraw
from farm.base.hashes import sha256_of
from farm.base.text import reason_line
from farm.builds.bundles.cache import folder_size
from farm.devices.files import local_errors

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.base.config.shared import ArtifactsAddress
    from farm.store.objects.places import FilePlace, Stored


# Cache of a shared farm's files on this machine: runtimes, artifacts that were read, code of suites.


OBJECTS, SUITES, MAKING = "objects", "suites", "making"
"""Folders of a cache: fetched files, code of suites, and inside of the first, files before their upload."""
CONTENT = "content"
"""File in the folder of an object; its modification time is the time of the last use."""


class CachedObject(NamedTuple):
    """Folder of the cache, whose content can be fetched again."""

    folder: Path
    nbytes: int
    used_ms: int


def cached_objects(cache_dir: Path) -> list[CachedObject]:
    """Return the cached objects, most recently used first."""
    found = []
    for folder in _parents(cache_dir):
        if "." in folder.name or not folder.is_dir():
            continue
        content = folder / CONTENT
        try:
            used_ms = (content if content.is_file() else folder).stat().st_mtime_ns // 1_000_000
        except OSError:
            continue  # removed meanwhile
        found.append(CachedObject(folder, folder_size(folder)[1], used_ms))
    return sorted(found, key=lambda one: -one.used_ms)


def prune_objects(cache_dir: Path, *, older_than_s: float, dry_run: bool) -> list[CachedObject]:
    """Remove objects without a use for `older_than_s`, and partial downloads; return the removed objects.

    With `dry_run` only return the objects that would be removed.
    """
    horizon_ms = (time.time() - older_than_s) * 1000
    old = [one for one in cached_objects(cache_dir) if one.used_ms <= horizon_ms]
    if not dry_run:
        for one in old:
            withdraw(one.folder)
        for parent in {folder.parent for folder in _parents(cache_dir)}:
            sweep(parent)
        sweep_own(cache_dir / OBJECTS / MAKING)
    return old


def _parents(cache_dir: Path) -> Iterator[Path]:
    # Skip links, which could lead out of the cache.
    for kind in (OBJECTS, SUITES):
        for parent in (cache_dir / kind).glob("[0-9a-f][0-9a-f]"):
            if not parent.is_symlink():
                yield from (one for one in parent.iterdir() if not one.is_symlink())


# Files of a shared farm by their SHA-256: bundles, runtimes, code of suites, artifacts of attempts.
#
# Every transferred file is compared with its hash, in both directions: write access to the place is not enough to
# change a program. Fetched files stay in the cache of this machine, so that each is transferred once.
#
#     PLACE/ab/abcd...     file, named by its SHA-256
#     PLACE/incoming/      files being written; a file of a day's age there belongs to a dead process


logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

GRACE_S = 24 * 3600.0
"""Least age of an unnamed file before its removal: far longer than until the row that names it is recorded."""

READER_PATIENCE_S = 5.0
"""Time that a reading command waits for an unreachable place."""
MOST_BYTES = 64 << 30
"""Most bytes of a file: the bundle of the largest model for a device has a fraction of it."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
# Reads of a file with a wrong hash: the first may have been damaged in transfer.
_TRIES = 2
# Time for which a file that is known to be there is not looked up again.
_KNOWN_S = 3600.0
_MOST_KNOWN = 100_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_NOTED_AFTER_S = 1.0
# Errors that waiting does not end.
_FOR_GOOD = {errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_AWAY = "the place where the farm keeps its files is away, no device and no code is at fault"
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError")
_LIBRARIES = ("paramiko", "botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs", "asyncio")


class Objects:
    """Files of a shared farm; for any number of threads."""

    def __init__(self, place: FilePlace, where: str, cache_dir: Path, patience: PlaceRetry) -> None:
        self._place, self._where, self._patience = place, where, patience
        self._root = cache_dir / OBJECTS
        self._known: dict[str, float] = {}

    def put(self, path: Path) -> str:
        """Upload a file, and return its SHA-256, as hex. The whole file is in the place on return.

        The file stays for GRACE_S at least, and for as long as a row of the store names it. Raises ArtifactsError for a
        place that stays away or refuses, LocalError for a file that cannot be read or changes meanwhile.
        """
        with local_errors(path):
            name = sha256_of(path)
        if time.monotonic() - self._known.get(name, -_KNOWN_S) >= _KNOWN_S:
            self._patience.retry_while_away(lambda: self._put(name, path))
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[name] = time.monotonic()
        return name

    def has(self, sha256: str) -> bool:
        """Return whether a file is there. Raises ArtifactsError for a place that stays away or refuses."""
        name = require_sha256(sha256)
        return self._patience.retry_while_away(lambda: self._place.find(name)) is not None

    def get(self, sha256: str) -> Path:
        """Return a file in the cache of this machine, fetched if missing or damaged. It is executable.

        Several processes fetch a file only once. Raises ArtifactLostError for a file that is missing or does not have
        its hash, ArtifactsError for a place that stays away, UntrustedError for a cache that others may write,
        LocalError and InfraError for a cache that cannot be written.
        """
        name = require_sha256(sha256)

        def fill(folder: Path) -> None:
            self.fetch(name, folder / CONTENT)
            (folder / CONTENT).chmod(0o555)

        path = published(self._root / name[:2] / name, fill, lambda folder: _is_whole(folder / CONTENT, name)) / CONTENT
        # Note the time of use, for pruning; a file of root refuses that and is readable all the same.
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def fetch(self, sha256: str, target: Path, most_bytes: int = MOST_BYTES) -> None:
        """Write a file to `target`, verified. Raises as `get`; ArtifactLostError for more than `most_bytes`."""
        name = require_sha256(sha256)
        try:
            for _ in range(_TRIES):
                if self._patience.retry_while_away(lambda: self._copy(name, target, most_bytes)):
                    return
            raise ArtifactLostError(
                f"{self._where}: {name} is damaged (its content has another hash) and is not used: remove it there"
            )
        except ArtifactLostError:
            self._known.pop(name, None)
            raise

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder in the cache of this machine for files before their upload, removed afterwards.

        Raises InfraError.
        """
        with own_folder(self._root / MAKING, secrets.token_hex(8)) as folder:
            yield folder

    def all(self) -> Iterator[Stored]:
        """Yield every file of the place. Raises ArtifactsError."""
        listed = self._patience.retry_while_away(lambda: list(self._place.all()))
        return (one for one in listed if _SHA256.fullmatch(one.name))

    def discard(self, sha256: str, grace_s: float = GRACE_S) -> bool:
        """Remove an unnamed file; return False if it is missing, too young or may not be removed."""
        name = require_sha256(sha256)
        removed = self._patience.retry_while_away(
            lambda: self._place.remove(name, lambda one: time.time() - one.modified_s > grace_s)
        )
        self._known.pop(name, None)
        return removed

    def sweep(self) -> int:
        """Remove files that dead processes left partially written a day ago; return their number."""
        return self._patience.retry_while_away(self._place.sweep)

    def _put(self, name: str, path: Path) -> None:
        found = self._place.find(name)
        with local_errors(path):
            nbytes = path.stat().st_size
        # A file of another size is damaged: it is written again.
        if found is not None and found.nbytes == nbytes:
            age_s = time.time() - found.modified_s
            # A young or renewed file is not removed soon, even with clocks that differ by an hour.
            if age_s < GRACE_S / 2 or self._place.renew(name):
                return
        source = _Source(name, path)
        self._place.write(name, source.chunks(), source.check)
        written = self._place.find(name)
        if written is None or written.nbytes != source.nbytes:
            raise ArtifactsError(f"{name} is not there, whole, after it was written: is the place full?")

    def _copy(self, name: str, target: Path, most_bytes: int) -> bool:
        """Write a file to `target`, and return whether its content has its hash."""
        digest, nbytes = hashlib.sha256(), 0
        local = _LocalFile(target)
        try:
            for chunk in self._place.read(name):
                nbytes += len(chunk)
                if nbytes > most_bytes:
                    limit = f"more than {most_bytes >> 20} MiB"
                    raise ArtifactLostError(f"{self._where}: {name} has {limit}: it is not used")
                digest.update(chunk)
                local.write(chunk)
        except FileNotFoundError:
            if self._place.find(name) is not None:
                raise
            raise ArtifactLostError(f"{self._where}: {name} is not there: it may have been pruned") from None
        finally:
            local.close()
        return digest.hexdigest() == name


def open_objects(config: Config, *, patience_s: float | None = None) -> Objects:
    """Return the files of the shared farm of `config`, without a first access.

    `patience_s` is the time to wait for an unreachable place, by default as for the store (`health.store_wait_s`).
    Raises UsageError for a farm of one machine, MissingToolError without the libraries.
    """
    address = config.artifacts
    if address is None:
        raise UsageError("this farm is of one machine: its files are in its state folder (docs/guides/three_hosts.md)")
    where = str(address)
    seconds = config.health.store_wait_s if patience_s is None else patience_s
    return Objects(_place_of(address), where, config.cache_dir, PlaceRetry(where, seconds))


def _place_of(address: ArtifactsAddress) -> FilePlace:
    """Return the place of `address`, without a first access. Raises MissingToolError without the libraries."""
    try:
        if address.scheme == "s3":
            from farm.store.objects.bucket import Bucket

            return Bucket(address)
        from farm.store.objects.places import Folder

        return Folder(address)
    except ImportError as error:
        what = f"artifacts = '{address.scheme}://...' needs the package {error.name}"
        raise MissingToolError(f"{what}: pip install 'snapdragon-farm[cluster]'") from None


class _Source:
    """Content of an upload, hashed while it is read, as a file might change meanwhile."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._digest = hashlib.sha256()
        self.nbytes = 0

    def chunks(self) -> Iterator[bytes]:
        with local_errors(self._path):
            file = self._path.open("rb")
        with file:
            while True:
                with local_errors(self._path):
                    chunk = file.read(_CHUNK)
                if not chunk:
                    return
                self._digest.update(chunk)
                self.nbytes += len(chunk)
                yield chunk

    def check(self) -> None:
        if self._digest.hexdigest() != self._name:
            raise LocalError(f"{self._path} was changed while it was read", cause="local", is_general=False)


class _LocalFile:
    """File of this machine, whose errors are distinguished from errors of the place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with local_errors(path):
            self._file = path.open("wb")

    def write(self, chunk: bytes) -> None:
        with local_errors(self._path):
            self._file.write(chunk)

    def close(self) -> None:
        with local_errors(self._path):
            self._file.close()


def _is_whole(path: Path, sha256: str) -> bool:
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def require_sha256(sha256: str) -> str:
    """Return `sha256`. Raises ArtifactLostError for any text but a hash, so that it never becomes a path."""
    if not _SHA256.fullmatch(sha256):
        raise ArtifactLostError(f"{sha256[:80]!r} is not the SHA-256 of a file: another program wrote it")
    return sha256


class PlaceRetry:
    """Retries of actions on a place, for a limited time.

    The import of tenacity would take 50 ms of each command, in place of a loop of 20 lines.
    """

    def __init__(self, where: str, seconds: float) -> None:
        """`where` names the place in errors."""
        self._where, self._seconds = where, seconds
        self._lock, self._is_noted = threading.Lock(), False

    def retry_while_away(self, action: Callable[[], _Answer]) -> _Answer:
        """Return the result of `action`, called again until the place can be reached.

        Raises ArtifactsError for a place that stays away or refuses, and all other errors of `action`.
        """
        began = time.monotonic()
        end, pause = began + self._seconds, _FIRST_PAUSE_S
        while True:
            try:
                answer = action()
            except Exception as error:
                problem, for_good = _explain(error)
                if not problem:
                    raise
                if for_good:
                    raise ArtifactsError(f"{self._where}: {problem}") from None
                if time.monotonic() + pause > end:
                    waited = f" (tried for {self._seconds:g} s)" if self._seconds >= 1 else ""
                    raise ArtifactsError(f"{self._where}: {problem}{waited}: {_AWAY}") from None
            else:
                self._warn_once("")
                return answer
            if time.monotonic() - began > _NOTED_AFTER_S:
                self._warn_once(problem)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _warn_once(self, problem: str) -> None:
        """Log that a place is away, once for all waiting threads, or that it is there again."""
        with self._lock:
            if self._is_noted == bool(problem):
                return
            self._is_noted = bool(problem)
        if problem:
            logger.warning("waiting for %s: %s", self._where, problem)
        else:
            logger.info("%s is there again", self._where)


def _explain(error: Exception) -> tuple[str, bool]:
    """Return the problem of the place, empty for other errors, and whether waiting is useless."""
    if isinstance(error, DeviceError):
        # Unknown host keys and refused logins are final; a gone or silent machine may return.
        return error.problem, not isinstance(error, DeviceGoneError | DeviceTimeoutError)
    if isinstance(error, FarmError):
        return (str(error), False) if type(error) is ArtifactsError else ("", True)
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        how = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them into ~/.aws/credentials"
        return f"no credentials for S3 are there ({name}): {how}", True
    if isinstance(error, PermissionError):
        return f"it refuses: {_text(error)}", True
    if isinstance(error, OSError):
        return _text(error), error.errno in _FOR_GOOD
    is_theirs = isinstance(error, EOFError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return (_text(error), False) if is_theirs else ("", True)


def _text(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return reason_line(str(text))
