"""Artifacts: files by the hash of their content, stored once for any number of attempts, never changed, safe to share.

    ROOT/ab/cd/abcd...   files named by their SHA-256
    ROOT/incoming/       files being written; old files there were left by a dead process

Files are stored uncompressed: ETDumps and outputs of quantized models hardly shrink, and any tool can read them. On a
shared farm, files missing here are fetched from the farm's place for files (`farm.store.objects`).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from farm.base.errors import ArtifactsError, FarmError, StoreError
from farm.base.hashes import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farm.base.config.settings import Config
    from farm.store.objects.objects import Objects
    from farm.store.records import ArtifactRecord

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
# Age at which a file in `incoming` is removed: far longer than writing the largest artifact takes.
_LEFT_BEHIND_S = 24 * 3600.0
# Age below which an artifact is not removed: far longer than the time from its write to the record of its attempt.
GRACE_S = 24 * 3600.0
# Most bytes that a report fetches ahead; a reader's request fetches further files.
_BROUGHT_BYTES = 1 << 30
_AT_ONCE = 4


def open_artifacts(config: Config) -> ArtifactStore:
    """Return the artifacts of attempts on this machine and, for a shared farm, on every host."""
    root = config.state_dir / "artifacts"
    if not config.is_shared:
        return ArtifactStore(root)

    def shared() -> Objects:
        from farm.store.objects.objects import READER_PATIENCE_S, open_objects

        return open_objects(config, patience_s=READER_PATIENCE_S)

    return ArtifactStore(root, shared)


class ArtifactStore:
    """Artifacts under a folder; several processes may put and read at once."""

    def __init__(self, root: Path, shared: Callable[[], Objects] | None = None) -> None:
        """Use the files under `root`; missing ones are read from the shared farm's files, which `shared` opens."""
        self._root, self._shared = root, shared
        self._incoming = root / "incoming"
        self._objects: Objects | None = None
        self._is_away = False

    def put(self, content: Path | bytes) -> str:
        """Store a file or bytes, and return the SHA-256, as hex.

        After the return, the content is on the disk under its name and survives a power loss. Raises StoreError
        for a read or write error; then nothing was published.
        """
        try:
            if not isinstance(content, bytes):
                with content.open("rb") as source:
                    return self._write(source)
            sha256 = hashlib.sha256(content).hexdigest()
            return sha256 if self._renewed(sha256) else self._write(io.BytesIO(content))
        except OSError as error:
            raise StoreError(f"{error.filename or self._root}: the artifact is not kept: {error.strerror}") from error

    def path(self, sha256: str) -> Path:
        """Return the path of an artifact, existing or not. Raises StoreError for an invalid hash."""
        if not _SHA256.fullmatch(sha256):
            raise StoreError(f"{sha256[:80]!r} is not the SHA-256 of an artifact")
        return self._root / sha256[:2] / sha256[2:4] / sha256

    def find(self, sha256: str) -> Path | None:
        """Return the path of an artifact, None if it is missing or `sha256` is no hash.

        A missing artifact of a shared farm is fetched first; None as well if the farm's files do not answer.
        """
        if self.size(sha256) is not None:
            return self.path(sha256)
        if self._shared is None or not _SHA256.fullmatch(sha256):
            return None
        try:
            return self._fetch(sha256)
        except ArtifactsError:
            return None

    def may_find(self, sha256: str) -> bool:
        """Return whether an artifact is here or may be among a shared farm's files, without a request to them."""
        return self.size(sha256) is not None or (self._shared is not None and bool(_SHA256.fullmatch(sha256)))

    def bring(self, records: Iterable[ArtifactRecord]) -> None:
        """Fetch many artifacts of a shared farm, as far as they exist and within `_BROUGHT_BYTES`; raises nothing."""
        left, wanted = _BROUGHT_BYTES, []
        for record in {one.sha256: one for one in records}.values():
            if self._shared is not None and self.size(record.sha256) is None and record.size <= left:
                left -= record.size
                wanted.append(record.sha256)
        with ThreadPoolExecutor(_AT_ONCE, "fetch") as threads:
            list(threads.map(self._try_fetch, wanted))

    def share(self, records: Iterable[ArtifactRecord]) -> None:
        """Copy local artifacts to the shared farm's files for the other hosts; after an error they stay local only."""
        if self._shared is None:
            return
        here = [self.path(one.sha256) for one in records if self.size(one.sha256) is not None]
        with suppress(FarmError):
            self._objects = self._objects or self._shared()
            for path in here:
                self._objects.put(path)

    def open(self, sha256: str) -> BinaryIO:
        """Open an artifact for reading. Raises StoreError if neither this machine nor a shared farm's files have it."""
        path = self.path(sha256)
        if self._shared is not None and self.size(sha256) is None:
            path = self._fetch(sha256)
        try:
            return path.open("rb")
        except OSError as error:
            raise StoreError(
                f"{path}: the artifact cannot be read: {error.strerror}: was it pruned, or is it on another machine?"
            ) from error

    def _fetch(self, sha256: str) -> Path:
        if self._shared is None or self._is_away:
            # A reader of a hundred files waits for the timeout once, not a hundred times.
            raise ArtifactsError("the place where the farm keeps its files is away")
        try:
            self._objects = self._objects or self._shared()
            return self._objects.get(sha256)
        except ArtifactsError as error:
            self._is_away = type(error) is ArtifactsError
            raise

    def _try_fetch(self, sha256: str) -> None:
        with suppress(FarmError):
            self._fetch(sha256)

    def discard(self, sha256: str, grace_s: float = GRACE_S) -> int | None:
        """Remove an artifact that no attempt names, and return its size, in bytes.

        Return None if it is missing, was put within `grace_s` so that its attempt may not be recorded yet, cannot be
        removed by this user, or if `sha256` is no hash.
        """
        if not _SHA256.fullmatch(sha256):
            return None
        path = self.path(sha256)
        taken = self._incoming / f"{sha256}.{os.getpid()}.pruned"
        try:
            if not _is_old(path, grace_s):
                return None
            self._incoming.mkdir(parents=True, exist_ok=True)
            # A process that puts the same content from here on finds no file, and writes it again.
            path.rename(taken)
            if not _is_old(taken, grace_s):
                # Another process put it between the age check and the rename.
                taken.rename(path)
                return None
            size = taken.stat().st_size
            taken.unlink()
        except OSError:
            return None
        return size

    def all(self) -> Iterator[str]:
        """Yield the SHA-256 of the artifacts on this machine that are old enough to discard."""
        for path in self._root.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]/*"):
            if _SHA256.fullmatch(path.name) and _is_old(path):
                yield path.name

    def size(self, sha256: str) -> int | None:
        """Return the size of an artifact, in bytes; None if it is missing or `sha256` is no hash."""
        try:
            return self.path(sha256).stat().st_size
        except (OSError, StoreError):
            return None

    def _write(self, source: BinaryIO) -> str:
        """Store the content of `source`, unless it is here, and return its SHA-256."""
        self._make_incoming()
        # The hash is computed during the copy: the source might change between two readings.
        digest = hashlib.sha256()
        descriptor, name = tempfile.mkstemp(dir=self._incoming)
        try:
            with os.fdopen(descriptor, "wb") as file:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                sha256 = digest.hexdigest()
                if not self._renewed(sha256):
                    file.flush()
                    # Read-only for every user with access to the folder.
                    os.fchmod(descriptor, 0o444)
                    os.fsync(descriptor)
                    self._publish(Path(name), sha256)
        finally:
            Path(name).unlink(missing_ok=True)
        return sha256

    def _renewed(self, sha256: str) -> bool:
        """Return whether an artifact is here, whole; its age starts again, so that it stays as long as a new one."""
        try:
            os.utime(self.path(sha256))
            return sha256_of(self.path(sha256)) == sha256
        except OSError:
            # The file is missing, or belongs to another user so that its time cannot be set: write it again.
            return False

    def _make_incoming(self) -> None:
        """Make the folder of unfinished files, and remove old files of dead processes there."""
        if not self._incoming.is_dir():
            self._incoming.mkdir(parents=True, exist_ok=True)
            _sync_folder(self._root)
            _sync_folder(self._root.parent)
        for path in self._incoming.iterdir():
            with suppress(OSError):
                if _is_old(path, _LEFT_BEHIND_S):
                    path.unlink()

    def _publish(self, written: Path, sha256: str) -> None:
        path = self.path(sha256)
        for folder in (path.parent.parent, path.parent):
            with suppress(FileExistsError):
                folder.mkdir()
                _sync_folder(folder.parent)
        # Two processes that put the same content at the same time replace the file with an equal one.
        written.replace(path)
        _sync_folder(path.parent)


def _is_old(path: Path, grace_s: float = GRACE_S) -> bool:
    return time.time() - path.stat().st_mtime > grace_s


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
