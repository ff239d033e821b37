"""Caches without bundles for programs that measure compilation: runners, SDKs and environments are links."""

from __future__ import annotations

from pathlib import Path

# Everything that a compiled job leaves in a cache.
_COMPILED = ("bundles", "builders", "traced", "sources")


def make_empty_cache(folder: Path, cache: Path) -> Path:
    """Make `folder` a cache without bundles, with links to the other parts of `cache`; return it."""
    folder.mkdir(parents=True)
    if cache.is_dir():
        for path in cache.iterdir():
            if path.name not in _COMPILED:
                (folder / path.name).symlink_to(path.resolve())
    return folder
