"""Folders of a cache that are made once, by whichever process comes first, and are never seen half done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_LOCK, _PARTIAL = ".lock", ".partial"
# What a full disk says, whoever meets it first; any other error inside `fill` is `fill`'s own.
_FULL = {errno.ENOSPC, errno.EDQUOT}


def published(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `fill` (which gets an empty folder on the same file system) unless it is there.

    Other processes wait while one makes it. What `fill` raises is passed on and leaves nothing behind; what a
    killed one left is removed by the next. Raises InfraError when the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    with contextlib.ExitStack() as stack:
        with _unwritable(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder.with_name(folder.name + _LOCK)))
            if folder.is_dir():
                return folder
            for left in folder.parent.glob(f"{folder.name}.*{_PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=_PARTIAL, dir=folder.parent))
        try:
            with _unwritable(folder, only=_FULL):
                fill(partial)
            with _unwritable(folder):
                # mkdtemp lets nobody else in; a cache may be shared.
                partial.chmod(0o755)
                partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


@contextlib.contextmanager
def _unwritable(folder: Path, only: Collection[int] = ()) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        raise InfraError(
            f"cannot write the cache: {folder}: {error.strerror or error}; "
            "free some space with 'farm cache prune', or set FARM_CACHE_DIR to another folder"
        ) from error


@contextlib.contextmanager
def own_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent` that lives as long as this process, at most.

    Those of processes that were killed are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for lock in parent.glob(f"*{_LOCK}"):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(lock, wait=False):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()
    folder = parent / name
    lock = folder.with_name(folder.name + _LOCK)
    with _locked(lock):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def withdraw(folder: Path) -> None:
    """Remove a published folder, in one step for everybody who looks; the next `published` makes it anew."""
    grave = folder.with_name(f"{folder.name}.withdrawn{_PARTIAL}")
    shutil.rmtree(grave, ignore_errors=True)
    try:
        folder.rename(grave)
    except FileNotFoundError:
        return
    shutil.rmtree(grave, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes left of folders in `parent` that nobody is making now."""
    for left in parent.glob(f"*{_PARTIAL}"):
        name = left.name.partition(".")[0]
        with contextlib.suppress(BlockingIOError), _locked(parent / (name + _LOCK), wait=False):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    # The file stays: to remove it would let two processes hold locks on two files of one name.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
