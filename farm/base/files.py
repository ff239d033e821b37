"""Files of this machine: replaced whole, trusted, and published in folders of a cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from farm.base.errors import InfraError, UntrustedError

# Files that others see as they were before, or whole: the one way in which farm replaces a file.


# A name has at most 255 bytes.
_NAME_CHARS = 50


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file beside `path` that takes its place when the block ends well, and is gone when it does not.

    `mode` are its permissions before the umask; `durable`, its content is on the disk by then. Raises OSError.
    """
    part = path.with_name(f".{path.name[:_NAME_CHARS]}.{os.urandom(6).hex()}.part")
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(number)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write `content` into `path`, as `replacing` does; the folder must be there. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive with `files` by name."""
    import io
    import zipfile

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return archive.getvalue()


# The end of a log file.


def end_of_log(path: Path, most_bytes: int = 4096) -> str:
    """Return the last bytes of a file as text; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


# Trust in files: a file that the user did not name is executed only if no other user could have written it.
#
# The rule (docs/reference/configuration.md): a file, every folder above it and every link on the way belong to the
# user or to root, and no other user may write them. Two exceptions: a folder with the sticky bit may be writable, as
# other users cannot replace its content (`/tmp`); the user's private group may write, as it has no other member
# (umask 002).


# As many as Linux follows.
_MOST_LINKS = 40
_ACL = "system.posix_acl_access"


def weakness(path: Path) -> str:
    """Return the reason why another user could have written or replaced `path`; empty for none.

    Links are followed and judged as well. For a missing `path` the folders above it are judged. Of several reasons the
    last on the way is returned.
    """
    found = ""
    for one, status in _way(path):
        if problem := _problem(one, status):
            found = f"{'it' if one == os.fspath(path) else one} {problem}"
    return found


def weakness_inside(folder: Path) -> str:
    """Return the same for `folder` and everything in it; links in it are judged and not followed."""
    if problem := weakness(folder):
        return problem
    # Names may come into a folder with the sticky bit, so that it is not enough here.
    if problem := _problem(os.fspath(folder), folder.stat(), sticky=False):
        return f"it {problem}"
    for one, status in _content(folder):
        if problem := _problem(one, status, sticky=False):
            return f"{one} {problem}"
    return ""


def weakness_of_open(descriptor: int) -> str:
    """Return the reason why another user could have written an open file, for content that is read once."""
    problem = _problem(descriptor, os.fstat(descriptor))
    return f"it {problem}" if problem else ""


def require_own(folder: Path) -> None:
    """Raise UntrustedError if another user could have written the content of `folder` or the folder itself."""
    problem = weakness_inside(folder) if folder.is_dir() else weakness(folder)
    if problem:
        raise UntrustedError(folder, problem)


def require_own_place(folder: Path) -> None:
    """Raise UntrustedError if another user could replace this user's files in `folder`."""
    if problem := weakness(folder):
        raise UntrustedError(folder, problem)


def _way(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every existing folder and link on the way to `path`, and `path` itself, with its status."""
    here, links = os.sep, 0
    left = list(reversed(path.absolute().parts[1:]))
    yield here, os.lstat(here)
    while left and links <= _MOST_LINKS:
        name = left.pop()
        if name == os.pardir:
            here = os.path.dirname(here)  # noqa: PTH120 - text, as all of it: this is done for every bundle
            continue
        one = os.path.join(here, name)  # noqa: PTH118
        try:
            status = os.lstat(one)
            target = Path(os.readlink(one)) if stat.S_ISLNK(status.st_mode) else None  # noqa: PTH115
        except OSError:
            return
        yield one, status
        if target is None:
            here = one
            continue
        links += 1
        if target.is_absolute():
            here = os.sep
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _content(folder: Path | str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from _content(entry.path)


def _problem(path: str | int, status: os.stat_result, *, sticky: bool = True) -> str:
    """Return the other users who may write a file of this status; `sticky`: the sticky bit makes a folder safe."""
    mode = status.st_mode
    owners = {0, os.geteuid()}
    if not stat.S_ISREG(mode):
        # In a user namespace the machine's root may have no number: the owner of `/` counts as root.
        owners.add(os.lstat(os.sep).st_uid)
    if status.st_uid not in owners:
        return f"belongs to {_user_name(status.st_uid)}"
    if stat.S_ISLNK(mode) or (sticky and stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH:
        return "can be written by all users"
    if mode & stat.S_IWGRP and (not _is_private(status.st_gid, os.geteuid()) or _has_acl(path)):
        return f"can be written by group {_group_name(status.st_gid)}"
    return ""


@functools.cache
def _is_private(gid: int, uid: int) -> bool:
    """Return whether a group is the user's private one: the primary one, of the same name, without any other member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    if (user.pw_gid, user.pw_name) != (gid, group.gr_name) or not set(group.gr_mem) <= {user.pw_name}:
        return False
    return all(other.pw_uid == uid for other in pwd.getpwall() if other.pw_gid == gid)


def _has_acl(path: str | int) -> bool:
    """Return whether a file has an access control list; the group's bits show only its mask."""
    if not hasattr(os, "getxattr"):
        return False
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# Folders of a cache, each made once by the first process that needs it and never visible half done.
#
# Their content is executed, so that folders writable by other users are refused: `farm.base.files`. The library
# filelock is not used, because it does not check that a locked file is still at its path.


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
    with contextlib.suppress(FileNotFoundError):
        folder.rename(grave)
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
