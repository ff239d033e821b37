"""Reaper of a farm process: it ends the children after the parent's death. `python -I -S reaper.py PARENT START`.

The parent writes one line per event to standard input:

    watch MARK              a process with FARM_PROCESS=MARK in its environment is about to start
    lead MARK PID START     the process leads the session PID; START is field 22 of /proc/PID/stat
    drop MARK               the process ended in order

A group is every process of that session and every process with the mark, so that neither a new session nor an emptied
environment escapes. After the death of a leader the rest of its group ends; after the death of the parent all groups
end and the reaper with them. Only the standard library is used, so that the start takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple

# Pipe by which the kernel kills a child after the end of its starter, also if other processes were killed with it.
#
# Only the standard library: virtual devices use it, and start in a fifth of a second.


class Lifeline:
    """A pipe between this process and one child; nothing is ever written to it.

    Any program can be the child: it inherits `child_end` and needs no code. When the last copy of our end is closed, as
    at every death of this process, the kernel signals the owner of the child's end: O_ASYNC, F_SETOWN and F_SETSIG of
    fcntl(2). Its share beside the reaper: docs/developers/architecture.md, "Processes".
    """

    def __init__(self) -> None:
        """Make the pipe. Raises OSError."""
        self.child_end, self._our_end = os.pipe()
        _lifelines.add(self)

    @property
    def our_end(self) -> int:
        """Descriptor for which poll(2) reports an error once no process holds the child's end; -1 if closed."""
        return self._our_end

    def tie(self, pid: int, *, group: bool) -> None:
        """Have the child that inherited `child_end`, or its whole process group, killed when this process is gone.

        A death between fork and this call goes unnoticed here.
        """
        # A child that is gone already, and waited for, owns nothing.
        with contextlib.suppress(ProcessLookupError):
            fcntl.fcntl(self.child_end, fcntl.F_SETOWN, -pid if group else pid)
            fcntl.fcntl(self.child_end, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.child_end, fcntl.F_SETFL, os.O_ASYNC)
        os.close(self.child_end)
        self.child_end = -1

    def cut(self) -> None:
        """Close both ends: the kernel kills the remaining processes of the child. May be called again."""
        self.let_go()
        if self.child_end >= 0:
            os.close(self.child_end)
            self.child_end = -1

    def let_go(self) -> None:
        """Close our end alone."""
        number, self._our_end = self._our_end, -1
        if number >= 0:
            os.close(number)


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_of_all() -> None:
    # A forked copy of this process has no children of ours, and may live on.
    for lifeline in list(_lifelines):
        lifeline.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


# Reaper, and the groups of processes that it ends.


MARK = "FARM_PROCESS"

# Seconds between SIGTERM and SIGKILL.
GRACE_S = 1.0
# How long SIGKILL may take: only a process stuck in the kernel needs more, and nothing helps against that.
_KILL_S = 5.0
# A process that was forked a moment ago shows its mark only after exec.
_SETTLE_S = 0.3
# Most seconds between two looks at all processes while known ones are ending: each look reads two files per process.
_LOOK_S = 0.1
_PAUSE_S = 0.005


class Group(NamedTuple):
    """Processes of one spawn. `session` is 0 before its leader is known."""

    mark: str
    session: int = 0
    start: int = 0


class Stat(NamedTuple):
    """A part of /proc/PID/stat; `start` is in clock ticks since boot."""

    state: str
    session: int
    start: int


def read_stat(pid: int) -> Stat | None:
    """Return the state of a process, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib costs the reaper its quick start
            line = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, parentheses and blanks too.
    fields = line[line.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[3]), int(fields[19]))


def members(groups: Collection[Group]) -> set[int]:
    """Return the living processes of `groups`; a zombie does not live."""
    if not groups:
        return set()
    sessions = {group.session for group in groups if group.session and _is_leader(group)}
    marks = {f"{MARK}={group.mark}".encode() for group in groups}
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        stat = read_stat(int(name))
        if stat is None or stat.state in "ZX":
            continue
        if stat.session in sessions or marks & _environment(name):
            found.add(int(name))
    return found


def _is_leader(group: Group) -> bool:
    """Return whether the session's number still means this session: it is given away again only when that is empty."""
    stat = read_stat(group.session)
    return stat is None or stat.start == group.start


def _environment(pid: str) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def end(groups: Collection[Group], grace_s: float = GRACE_S, settle_s: float = 0.0) -> None:
    """End every process of `groups`: SIGTERM, after `grace_s` SIGKILL.

    Returns when none is left and none came for `settle_s`, or when nothing helps.
    """
    started = time.monotonic()
    settled = started + settle_s
    asked: set[int] = set()
    while time.monotonic() < started + grace_s + _KILL_S:
        living = members(groups)
        if not living and time.monotonic() >= settled:
            return
        if time.monotonic() >= started + grace_s:
            _signal(living, signal.SIGKILL)
        else:
            _signal(living - asked, signal.SIGTERM)
            asked |= living
        left_s = started + grace_s - time.monotonic()
        _await_exits(living, min(_LOOK_S, left_s) if left_s > 0 else _LOOK_S)


def _await_exits(pids: Iterable[int], timeout_s: float) -> None:
    """Return after a pause, once all of `pids` have exited, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    poll, left = select.poll(), set[int]()
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                left.add(number := os.pidfd_open(pid))
                poll.register(number, select.POLLIN)
        if not left:
            time.sleep(_PAUSE_S)
        while left and (rest_s := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(rest_s * 1000):
                poll.unregister(number)
                left.remove(number)
                os.close(number)
    finally:
        for number in left:
            os.close(number)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


class Reaper:
    """The groups that are watched, and what happens to them."""

    def __init__(self, parent: int, parent_start: int) -> None:
        self._groups: dict[str, Group] = {}
        self._leaders: dict[int, str] = {}
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        # A child that the parent forked without exec keeps the pipe open after the parent's death.
        try:
            self._parent = self._open(parent, parent_start)
        except ProcessLookupError:
            self._parent = -1
        self._rest = b""

    def run(self) -> None:
        """Return when the parent is dead and nothing of it is left."""
        while True:
            # -1: it was dead before it could be watched.
            ready = {number for number, _ in self._poll.poll()} if self._parent >= 0 else {-1}
            # Leaders are handled before standard input, whose lines open descriptors: a new descriptor could get the
            # number of a closed one, and the closed one's event would end the wrong group.
            for number in ready & self._leaders.keys():
                self._leader_died(number)
            if (0 in ready and not self._read()) or self._parent in ready:
                self._read_rest()
                settle_s = 0.0 if all(group.session for group in self._groups.values()) else _SETTLE_S
                end(self._groups.values(), settle_s=settle_s)
                return

    def _read_rest(self) -> None:
        """Read the lines that the parent wrote before its death; a copy of it may keep the pipe open."""
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):
            while self._read():
                pass

    def _read(self) -> bool:
        chunk = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._obey(line.decode().split())
        return bool(chunk)

    def _obey(self, words: list[str]) -> None:
        event, mark = words[:2]
        if event == "watch":
            self._groups[mark] = Group(mark)
        elif event == "lead" and mark in self._groups:
            self._groups[mark] = group = Group(mark, int(words[2]), int(words[3]))
            try:
                leader = self._open(group.session, group.start)
            except ProcessLookupError:
                end([self._groups.pop(mark)])
            else:
                self._leaders[leader] = mark
        elif event == "drop":
            self._groups.pop(mark, None)
            for number in [number for number, led in self._leaders.items() if led == mark]:
                self._forget(number)

    def _open(self, pid: int, start: int) -> int:
        """Return a descriptor that is readable when the process has died. Raises ProcessLookupError when it has."""
        number = os.pidfd_open(pid)
        stat = read_stat(pid)
        if stat is None or stat.start != start:
            os.close(number)
            raise ProcessLookupError
        self._poll.register(number, select.POLLIN)
        return number

    def _leader_died(self, number: int) -> None:
        group = self._groups.pop(self._leaders[number], None)
        self._forget(number)
        if group is not None:
            end([group])

    def _forget(self, number: int) -> None:
        self._poll.unregister(number)
        os.close(number)
        del self._leaders[number]


def main() -> None:
    """Run until the parent is dead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Reaper(int(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
