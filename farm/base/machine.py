"""This machine: its memory and the memory of processes, a clock that processes share, and the user. Torch-free."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from pathlib import Path

# How much memory there is on this machine, and how much a process has. Torch-free.
#
# On Linux, from /proc. Where there is none (macOS) a process seems to have nothing: nothing is limited there.


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_KILOBYTE = 1024


def usable_bytes() -> int:
    """Return the memory for all processes here: the machine's, or the limit of a cgroup (v2)."""
    least = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    for folder in _own_cgroups():
        with contextlib.suppress(OSError):
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            least = min(least, int(limit)) if limit.isdigit() else least
    return least


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and of all it started, directly or not; 0 when it is gone.

    Pages that several of them share count for each: an upper bound, which `own_bytes` makes exact.
    """
    return sum(_resident(member) for member in _family(pid))


def own_bytes(pid: int) -> int:
    """Return the same with shared pages in equal parts (PSS), at some milliseconds a gigabyte."""
    return sum(_bytes_in(_PROC / str(member) / "smaps_rollup", b"Pss:") for member in _family(pid))


def reset_peak() -> bool:
    """Let `peak_bytes` begin anew with what this process has now; return whether the system can do that."""
    try:
        # proc(5), clear_refs: 5 sets the peak (VmHWM) to the present resident memory and has no other effect.
        (_PROC / "self" / "clear_refs").write_bytes(b"5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the peak resident memory of this process without its children; 0 if unknown."""
    return _bytes_in(_PROC / "self" / "status", b"VmHWM:")


def _resident(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _bytes_in(file: Path, name: bytes) -> int:
    """Return a size of a file in /proc by its name; 0 where there is none."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * _KILOBYTE for line in lines if line.startswith(name)), 0)


def _family(pid: int) -> list[int]:
    """Return the process, its children, theirs, and so on."""
    found = [pid]
    for member in found:
        # Every thread has its own children. A process, or a thread, may have ended just now.
        with contextlib.suppress(OSError):
            for thread in (_PROC / str(member) / "task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (thread / "children").read_bytes().split())
    return found


def _own_cgroups() -> list[Path]:
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    # The one line of version 2 is `0::/path`; seen from inside a container, the path is often just `/`.
    names = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    own = [_CGROUPS / name.strip("/") for name in names]
    return [folder for path in own for folder in (path, *path.parents) if folder.is_relative_to(_CGROUPS)]


# A clock that the processes of one machine share.


def now_s() -> float:
    """Return seconds on a clock that all processes of this machine share, and that goes on while it sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# Name of the user who runs farm.


def user_name() -> str:
    """Return the name of the user, or the number for a user without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
