"""What the cache of this machine keeps of a shared farm's files: runtimes, artifacts that were read, code of suites."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from farm.base.publish import sweep, sweep_own, withdraw
from farm.builds.bundles.cache import folder_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OBJECTS, SUITES, MAKING = "objects", "suites", "making"
"""Folders of a cache; in that of objects, what is made to be put."""
CONTENT = "content"
"""The file in the folder of an object, whose time is when it was last used."""


class CachedObject(NamedTuple):
    """One folder of the cache; another host has what is in it."""

    folder: Path
    nbytes: int
    used_ms: int


def cached_objects(cache_dir: Path) -> list[CachedObject]:
    """Return what is there, most recently used first."""
    found = []
    for folder in _folders(cache_dir):
        content = folder / CONTENT
        try:
            used_ms = (content if content.is_file() else folder).stat().st_mtime_ns // 1_000_000
        except OSError:
            continue  # removed meanwhile
        found.append(CachedObject(folder, folder_size(folder)[1], used_ms))
    return sorted(found, key=lambda one: -one.used_ms)


def prune_objects(cache_dir: Path, *, older_than_s: float, dry_run: bool) -> list[CachedObject]:
    """Remove what was not used for so long, and what was left half fetched; return what goes, or would."""
    horizon_ms = (time.time() - older_than_s) * 1000
    old = [one for one in cached_objects(cache_dir) if one.used_ms <= horizon_ms]
    if not dry_run:
        for one in old:
            withdraw(one.folder)
        for parent in {folder.parent for folder in _parents(cache_dir)}:
            sweep(parent)
        sweep_own(cache_dir / OBJECTS / MAKING)
    return old


def _folders(cache_dir: Path) -> Iterator[Path]:
    return (one for one in _parents(cache_dir) if "." not in one.name and one.is_dir())


def _parents(cache_dir: Path) -> Iterator[Path]:
    # No link leads out of the cache.
    for kind in (OBJECTS, SUITES):
        for parent in (cache_dir / kind).glob("[0-9a-f][0-9a-f]"):
            if not parent.is_symlink():
                yield from (one for one in parent.iterdir() if not one.is_symlink())
