"""Cache of a shared farm's files on this machine: runtimes, artifacts that were read, code of suites."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from farm.base.publish import sweep, sweep_own, withdraw
from farm.builds.bundles.cache import folder_size

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
    for folder in _folders(cache_dir):
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


def _folders(cache_dir: Path) -> Iterator[Path]:
    return (one for one in _parents(cache_dir) if "." not in one.name and one.is_dir())


def _parents(cache_dir: Path) -> Iterator[Path]:
    # Skip links, which could lead out of the cache.
    for kind in (OBJECTS, SUITES):
        for parent in (cache_dir / kind).glob("[0-9a-f][0-9a-f]"):
            if not parent.is_symlink():
                yield from (one for one in parent.iterdir() if not one.is_symlink())
