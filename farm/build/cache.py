"""The bundle cache: folders addressed by key. The time of a bundle's manifest is when it was last used."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import msgspec

from farm.build.bundle import MANIFEST, Bundle, load_bundle
from farm.errors import BundleError
from farm.publish import published, sweep, withdraw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class CacheEntry(msgspec.Struct, frozen=True):
    """One published bundle, for showing and pruning."""

    key: str
    job_id: str
    """The job it was first compiled for; others may share it."""
    nbytes: int
    used_ms: int
    """When it was last used, epoch milliseconds."""


class BundleCache:
    """Bundles below `root`. Safe for several processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bundles = root / "bundles"

    def folder(self, key: str) -> Path:
        """Return where the bundle of `key` is, or would be."""
        return self._bundles / key[:2] / key

    def lookup(self, key: str) -> Bundle | None:
        """Return the published bundle and mark it as used, or None. One that is damaged is removed and is None."""
        folder = self.folder(key)
        if not folder.is_dir():
            return None
        # A cache of another user can be read all the same.
        with contextlib.suppress(OSError):
            os.utime(folder / MANIFEST)
        try:
            bundle = load_bundle(folder)
            bundle.verify()
            if bundle.manifest.key == key:
                return bundle
        except BundleError:
            pass
        withdraw(folder)
        return None

    def build(self, key: str, fill: Callable[[Path], None]) -> Bundle:
        """Return the bundle of `key`, made by `fill` in an empty folder unless it is there.

        Another process that builds the same waits. What `fill` raises is passed on, and nothing is left behind.
        Raises InfraError when the cache cannot be written.
        """
        return self.lookup(key) or load_bundle(published(self.folder(key), fill))

    def entries(self) -> list[CacheEntry]:
        """Return what is there, most recently used first."""
        found = []
        for manifest in self._bundles.glob("*/*/" + MANIFEST):
            folder = manifest.parent
            try:
                bundle = load_bundle(folder)
                nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                used_ms = manifest.stat().st_mtime_ns // 1_000_000
            except (BundleError, OSError):
                continue  # removed meanwhile, or damaged: a lookup takes care of it
            if folder.name == bundle.manifest.key:  # not one that is being made
                found.append(CacheEntry(bundle.manifest.key, bundle.manifest.job_id, nbytes, used_ms))
        return sorted(found, key=lambda entry: -entry.used_ms)

    def prune(
        self, *, older_than_s: float = 0.0, keep_bytes: int | None = None, dry_run: bool = False
    ) -> list[CacheEntry]:
        """Remove the bundles not used for `older_than_s`, or the least recently used beyond `keep_bytes`.

        What killed builds left behind goes as well. Returns what was removed, or would be.
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
                    withdraw(self.folder(entry.key))
        if not dry_run:
            for parent in self._bundles.glob("*"):
                sweep(parent)
        return removed
