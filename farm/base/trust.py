"""Trust in files: a file that the user did not name is executed only if no other user could have written it.

The rule (docs/reference/configuration.md): a file, every folder above it and every link on the way belong to the user
or to root, and no other user may write them. Two exceptions: a folder with the sticky bit may be writable, as other
users cannot replace its content (`/tmp`); the user's private group may write, as it has no other member (umask 002).
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from farm.base.errors import UntrustedError

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
