"""What compiles leave in the cache when they are ended, and who removes it.

A bundle is made in a `.partial` folder, and a builder stands in a folder of its own, which is its TMPDIR as well. Both
have a lock that their process holds as long as it lives (`farm.system.publish`): what nobody holds is left over. The
pool removes what its builders leave; what a farm that was killed left, the next one removes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.system.publish import half_made, own_folder, sweep, sweep_own, without_owner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Leftover(msgspec.Struct, frozen=True):
    """One folder that nobody needs any more."""

    path: str
    files: int
    nbytes: int


def builder_folder(root: Path, name: str) -> AbstractContextManager[Path]:
    """Return the folder of a builder in the cache at `root`, which lives as long as this process, at most.

    To enter it raises OSError and UntrustedError.
    """
    return own_folder(_builders(root), name)


def work_in(folder: Path) -> None:
    """Make `folder` the current one, and the one of temporary files; before anything asks where those go.

    Python still finds modules in the folder in which it was started: `python -m` has that by its full name.
    """
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder)


def builder_folder_size(root: Path, name: str) -> int:
    """Return how many bytes are in the folder of a builder."""
    return folder_size(_builders(root) / name)[1]


def leftovers(root: Path) -> list[Leftover]:
    """Return what is left over in the cache at `root`; what a living process uses is not."""
    found = [*(left for parent in _bundle_parents(root) for left in half_made(parent)), *without_owner(_builders(root))]
    return [Leftover(str(path), *folder_size(path)) for path in found]


def remove_leftovers(root: Path) -> None:
    """Remove all of it."""
    for parent in _bundle_parents(root):
        sweep(parent)
    if not _builders(root).is_symlink():
        sweep_own(_builders(root))


def remove_builder(root: Path, name: str) -> None:
    """Remove what a builder left that has ended."""
    sweep_own(_builders(root), name)


def remove_half_made(bundle: Path) -> None:
    """Remove what was left of the folder of a bundle that nobody is making."""
    sweep(bundle.parent, bundle.name)


def folder_size(folder: Path) -> tuple[int, int]:
    """Return how many files are in `folder`, and their bytes, as far as they can be seen."""
    files = nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                nbytes += os.lstat(f"{parent}/{name}").st_size
            except OSError:
                continue  # removed meanwhile
            files += 1
    return files, nbytes


def _builders(root: Path) -> Path:
    return root / "builders"


def _bundle_parents(root: Path) -> Iterator[Path]:
    # No link leads out of the cache.
    return (path for path in (root / "bundles").glob("[0-9a-f][0-9a-f]") if not path.is_symlink())
