"""The bundle cache: folders addressed by key, published with one rename.

bundles/ab/abcdef.../    a published bundle; the time of its manifest is when it was last used
locks/abcdef...          held while that bundle is being built, so that two runs do not build it twice
tmp/PID-.../             being built; when PID is gone it is left-over
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from farm.build.bundle import MANIFEST, Bundle, load_bundle
from farm.errors import BundleError, InfraError
from farm.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class CacheEntry(msgspec.Struct, frozen=True):
    """One published bundle, for showing and pruning."""

    key: str
    job_id: str
    nbytes: int
    used_ms: int
    """When it was last used, epoch milliseconds."""


class BundleCache:
    """Bundles below `root`. Safe for several processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bundles, self._locks, self._tmp = root / "bundles", root / "locks", root / "tmp"

    def folder(self, key: str) -> Path:
        """Return where the bundle of `key` is, or would be."""
        return self._bundles / key[:2] / key

    def lookup(self, key: str) -> Bundle | None:
        """Return the published bundle and mark it as used, or None. One that is damaged counts as absent."""
        folder = self.folder(key)
        try:
            os.utime(folder / MANIFEST)
        except FileNotFoundError:
            return None
        except OSError:
            pass  # a cache that belongs to another user can be read all the same
        try:
            bundle = load_bundle(folder)
        except BundleError:
            self._remove(folder)
            return None
        if bundle.manifest.key != key or any(not (folder / name).is_file() for name in bundle.manifest.files):
            self._remove(folder)
            return None
        return bundle

    @contextmanager
    def building(self, key: str) -> Iterator[Path]:
        """Yield a new folder to build the bundle of `key` in; hold the key's lock meanwhile.

        Waits while another process builds the same: look the key up again first. The folder is gone afterwards
        unless `publish` moved it.
        """
        with _no_space_is_clear(self.root):
            for folder in (self._locks, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._locks / key, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = self._tmp / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
            with _no_space_is_clear(self.root):
                folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)

    def publish(self, key: str, folder: Path) -> Bundle:
        """Make `folder` the bundle of `key` and return it; when there is one already, that one."""
        final = self.folder(key)
        with _no_space_is_clear(self.root):
            for path in folder.rglob("*"):
                if path.is_file():
                    _sync(path)
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            _sync(final.parent)
        return load_bundle(final)

    def entries(self) -> list[CacheEntry]:
        """Return what is there, most recently used first."""
        found = []
        for manifest in self._bundles.glob("*/*/" + MANIFEST):
            try:
                bundle = load_bundle(manifest.parent)
                nbytes = sum(path.stat().st_size for path in manifest.parent.rglob("*") if path.is_file())
                used_ms = manifest.stat().st_mtime_ns // 1_000_000
            except (BundleError, OSError):
                continue  # removed meanwhile, or damaged: prune takes care of it
            found.append(CacheEntry(bundle.manifest.key, bundle.manifest.job_id, nbytes, used_ms))
        return sorted(found, key=lambda entry: -entry.used_ms)

    def prune(
        self, *, older_than_s: float = 0.0, keep_bytes: int | None = None, dry_run: bool = False
    ) -> list[CacheEntry]:
        """Remove the bundles not used for `older_than_s`, then the least recently used beyond `keep_bytes`.

        What a killed build left behind goes as well. Returns what was removed, or would be.
        """
        horizon_ms = (time.time() - older_than_s) * 1000
        total, removed = 0, []
        for entry in self.entries():
            total += entry.nbytes
            too_old = keep_bytes is None and entry.used_ms <= horizon_ms
            too_much = keep_bytes is not None and total > keep_bytes
            if too_old or too_much:
                removed.append(entry)
                if not dry_run:
                    self._remove(self.folder(entry.key))
        if not dry_run:
            self.sweep()
        return removed

    def sweep(self) -> None:
        """Remove what builds that were killed left behind."""
        for folder in self._tmp.glob("*-*"):
            pid = folder.name.partition("-")[0]
            if pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks.glob("*"):
            with lock.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                lock.unlink(missing_ok=True)

    def _remove(self, folder: Path) -> None:
        # By way of tmp, so that nobody sees half a bundle.
        self._tmp.mkdir(parents=True, exist_ok=True)
        grave = self._tmp / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            folder.rename(grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _no_space_is_clear(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InfraError(f"no space left for bundles in {root}: run 'farm cache prune' or free some") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise InfraError(
                f"cannot write to {root}: {error.strerror}; set FARM_CACHE_DIR to a folder of yours"
            ) from error
        raise
