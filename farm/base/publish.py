"""Folders of a cache, each made once by the first process that needs it and never visible half done.

Their content is executed, so that folders writable by other users are refused: `farm.base.trust`. The library filelock
is not used, because it does not check that a locked file is still at its path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from farm.base.errors import InfraError
from farm.base.trust import require_own, require_own_place

_LOCK, _PARTIAL = ".lock", ".partial"
# Errors of a full disk; other errors inside `fill` belong to `fill`.
_FULL = {errno.ENOSPC, errno.EDQUOT}
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def published(
    folder: Path,
    fill: Callable[[Path], None],
    is_whole: Callable[[Path], bool] = lambda _: True,
    *,
    anew: bool = False,
) -> Path:
    """Return `folder`, made by `fill` (which gets an empty folder on the same file system) unless it is there.

    An incomplete folder is made anew; with `anew` also a complete one, which stays until the new one is ready. Other
    processes wait meanwhile. Errors of `fill` are passed on and leave no files; the next call removes files of a killed
    one. Raises UntrustedError for a folder that another user could have written, InfraError for an unwritable cache.
    """
    require_own(folder)
    if not anew and folder.is_dir() and is_whole(folder):
        return folder
    with contextlib.ExitStack() as stack:
        with _unwritable(folder):
            make_folders(folder.parent)
            stack.enter_context(_locked(folder.with_name(folder.name + _LOCK)))
            if folder.is_dir():
                require_own(folder)
                if not anew and is_whole(folder):
                    return folder
                if not anew:
                    withdraw(folder)
            for left in folder.parent.glob(f"{folder.name}.*{_PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=_PARTIAL, dir=folder.parent))
        try:
            with _unwritable(folder, only=_FULL):
                fill(partial)
            with _unwritable(folder):
                _close_to_others(partial)
                # mkdtemp makes private folders; other users may read a cache.
                partial.chmod(0o755)
                if anew:
                    withdraw(folder)
                partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def make_folders(folder: Path) -> None:
    """Make a folder and its missing parents, writable by this user alone."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o755)


def _close_to_others(folder: Path) -> None:
    """Remove other users' write permission on the content of `folder`, given by a umask such as 002."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(mode):
                path.chmod(stat.S_IMODE(mode) & ~_WRITABLE_BY_OTHERS)


@contextlib.contextmanager
def _unwritable(folder: Path, only: Collection[int] = ()) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        raise InfraError(
            f"cannot write the cache: {folder}: {error.strerror or error}; "
            "free some space with 'farm setup cache prune --older 30d --yes', or set FARM_CACHE_DIR to another folder"
        ) from error


@contextlib.contextmanager
def own_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new private folder in `parent` that exists at most as long as this process.

    Folders of killed processes are removed first. Raises UntrustedError if other users could replace it.
    """
    make_folders(parent)
    require_own_place(parent)
    sweep_own(parent)
    folder = parent / name
    lock = folder.with_name(folder.name + _LOCK)
    with _locked(lock):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove_own(lock)


def sweep_own(parent: Path, name: str = "*") -> None:
    """Remove the folders of `own_folder` in `parent`, of that name or all, whose processes have ended."""
    for lock in parent.glob(f"{name}{_LOCK}"):
        # Another process holds the lock or removed the folder.
        with contextlib.suppress(OSError), _locked(lock, wait=False):
            _remove_own(lock)


def _remove_own(lock: Path) -> None:
    folder = lock.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    # The lock stays beside a folder that could not be removed.
    if not folder.exists():
        lock.unlink(missing_ok=True)


def withdraw(folder: Path) -> None:
    """Remove a published folder in one atomic step; the next `published` makes it anew."""
    grave = folder.with_name(f"{folder.name}.withdrawn{_PARTIAL}")
    shutil.rmtree(grave, ignore_errors=True)
    try:
        folder.rename(grave)
    except FileNotFoundError:
        return
    shutil.rmtree(grave, ignore_errors=True)


def sweep(parent: Path, name: str = "*") -> None:
    """Remove partial folders of killed processes in `parent`, of that name or all, that no process is making."""
    for left in parent.glob(f"{name}.*{_PARTIAL}"):
        with contextlib.suppress(OSError), _locked(_lock_of_partial(left), wait=False):
            shutil.rmtree(left, ignore_errors=True)


def half_made(parent: Path) -> list[Path]:
    """Return what `sweep` would remove in `parent`."""
    return [left for left in parent.glob(f"*{_PARTIAL}") if not _is_held(_lock_of_partial(left))]


def without_owner(parent: Path) -> list[Path]:
    """Return what `sweep_own` would remove in `parent`."""
    locks = [lock for lock in parent.glob(f"*{_LOCK}") if lock.with_suffix("").is_dir()]
    return [lock.with_suffix("") for lock in locks if not _is_held(lock)]


def _lock_of_partial(left: Path) -> Path:
    return left.with_name(left.name.partition(".")[0] + _LOCK)


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The removal of a folder removes this file as well, and a new one may exist meanwhile: two processes must
            # not hold locks on two files of one name.
            if is_at(path, file.fileno()):
                yield
                return


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still at that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
