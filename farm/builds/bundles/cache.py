"""Bundle cache: folders addressed by key. The mtime of a bundle's manifest is the time of its last use.

Keys come from stores that others may write, and bundles are executed: a key is checked before it becomes a path, files
that another user could have written are not used, and only folders of this cache are removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from farm.base.errors import BundleError, UsageError
from farm.base.files import half_made, published, require_own, sweep, sweep_own, withdraw, without_owner
from farm.base.forms import is_bundle_key
from farm.builds.bundles.bundle import MANIFEST, Bundle, load_bundle


class CacheEntry(msgspec.Struct, frozen=True):
    """Published bundle of the cache, for lists and pruning."""

    key: str
    job_id: str
    """Job that the bundle was first compiled for; others may share it. `damaged` for an unreadable manifest."""
    nbytes: int
    used_ms: int
    """Time of the last use, epoch milliseconds."""


class BundleCache:
    """Cache of bundles below `root`, safe for several processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bundles = root / "bundles"

    def folder(self, key: str) -> Path:
        """Return the folder of the bundle of `key`, existing or not. Raises UsageError for an invalid key."""
        if not is_bundle_key(key):
            raise UsageError(f"{key[:80]!r} is no key of a bundle: another program wrote it to the store")
        return self._bundles / key[:2] / key

    def lookup(self, key: str) -> Bundle | None:
        """Return the published bundle and mark it as used; None for a missing or damaged one, and for an invalid key.

        Removes nothing. Raises UntrustedError for a bundle that another user could have written.
        """
        if not is_bundle_key(key):
            return None
        folder = self.folder(key)
        if not folder.is_dir() or not self._is_inside(folder):
            return None
        require_own(folder)
        # A bundle that belongs to root is readable, although its time cannot be set.
        with contextlib.suppress(OSError):
            os.utime(folder / MANIFEST)
        return _whole(folder)

    def build(self, key: str, fill: Callable[[Path], None], *, anew: bool = False) -> Bundle:
        """Return the bundle of `key`; `fill` makes it in an empty folder if it is missing or damaged, or with `anew`.

        Another process that builds the same bundle waits. Errors of `fill` are passed on without a trace in the cache:
        an earlier bundle stays. Raises InfraError for a cache that cannot be written, and UntrustedError for a cache
        that another user could write.
        """
        folder = self.folder(key)
        if folder.is_dir() and not self._is_inside(folder):
            raise BundleError(f"{folder}: is reached by a link out of the cache {self.root}: remove the link")
        found = None if anew else self.lookup(key)
        return found or load_bundle(published(folder, fill, lambda one: _whole(one) is not None, anew=anew))

    def remove_half_made(self, key: str) -> None:
        """Remove the unfinished folders of a bundle that no process is making."""
        folder = self.folder(key)
        sweep(folder.parent, folder.name)

    def entries(self) -> list[CacheEntry]:
        """Return the published bundles, most recently used first."""
        found = []
        for folder in self._bundles.glob("*/*"):
            if not is_bundle_key(folder.name) or not self._is_inside(folder):
                continue  # a bundle that is being written
            try:
                manifest = folder / MANIFEST
                used_ms = (manifest if manifest.is_file() else folder).stat().st_mtime_ns // 1_000_000
                nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            except OSError:
                continue  # removed meanwhile
            found.append(CacheEntry(folder.name, _job_of(folder), nbytes, used_ms))
        return sorted(found, key=lambda entry: -entry.used_ms)

    def prune(
        self, *, older_than_s: float = 0.0, keep_bytes: int | None = None, dry_run: bool = False
    ) -> list[CacheEntry]:
        """Remove the bundles not used for `older_than_s`, or the least recently used beyond `keep_bytes`.

        Leftovers of interrupted compiles are removed as well. Returns the removed bundles; in a dry run the bundles to
        remove.
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
            remove_leftovers(self.root)
        return removed

    def _is_inside(self, folder: Path) -> bool:
        """Return whether a folder of bundles is really inside the cache, without a link that leads out of it."""
        return not (folder.is_symlink() or folder.parent.is_symlink())


def _job_of(folder: Path) -> str:
    """Return the job of the bundle in `folder`, `damaged` for an unreadable manifest."""
    try:
        return load_bundle(folder).manifest.job_id
    except BundleError:
        return "damaged"


def _whole(folder: Path) -> Bundle | None:
    """Return the bundle in `folder`; None for a damaged bundle or one whose key is not the folder's name."""
    try:
        bundle = load_bundle(folder)
        bundle.verify()
    except BundleError:
        return None
    return bundle if bundle.manifest.key == folder.name else None


# Leftovers of interrupted compiles. A bundle is made in a `.partial` folder, and a builder has a folder of its own,
# its TMPDIR as well. Both have a lock that their process holds until its end (farm/base/files.py): a folder without
# a lock holder is a leftover. The pool removes the leftovers of its builders; after a killed farm process, the next
# farm process removes them.


class Leftover(msgspec.Struct, frozen=True):
    """Folder in the cache without a living owner."""

    path: str
    files: int
    nbytes: int


def work_in(folder: Path) -> None:
    """Make `folder` the current folder and the folder of temporary files, before the first use of `tempfile`.

    Python still finds modules in its start folder: `python -m` has the full path of it.
    """
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder)


def leftovers(root: Path) -> list[Leftover]:
    """Return the leftovers in the cache at `root`, without the folders of living processes."""
    found = [
        *(left for parent in _bundle_parents(root) for left in half_made(parent)),
        *without_owner(builder_folders(root)),
    ]
    return [Leftover(str(path), *folder_size(path)) for path in found]


def remove_leftovers(root: Path) -> None:
    """Remove what `leftovers` lists."""
    for parent in _bundle_parents(root):
        sweep(parent)
    if not builder_folders(root).is_symlink():
        sweep_own(builder_folders(root))


def folder_size(folder: Path) -> tuple[int, int]:
    """Return the number of files in `folder`, and their bytes, as far as they are readable."""
    files = nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                nbytes += os.lstat(f"{parent}/{name}").st_size
            except OSError:
                continue  # removed meanwhile
            files += 1
    return files, nbytes


def builder_folders(root: Path) -> Path:
    """Return the parent of the builders' folders in the cache at `root`, for `own_folder` and `sweep_own`."""
    return root / "builders"


def _bundle_parents(root: Path) -> Iterator[Path]:
    # No link leads out of the cache.
    return (path for path in (root / "bundles").glob("[0-9a-f][0-9a-f]") if not path.is_symlink())
