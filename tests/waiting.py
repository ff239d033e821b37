"""Waits of tests: the one loop that polls, and the end of a process by its descriptor."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import AnyStr, TypeVar

from farm.base.hashes import CLOCK_STEP_NS
from farm.base.processes import Child
from farm.base.reaper import read_stat

_T = TypeVar("_T")
# A short wait costs milliseconds; a long one leaves the processors to the processes under test.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class Started(subprocess.Popen[AnyStr]):
    """Process that a failure of the `with` block kills; `Popen` waits for its end for ever."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)


def poll(condition: Callable[[], _T], timeout_s: float) -> _T:
    """Return the first true result of `condition`, or its last result when `timeout_s` has passed."""
    deadline, pause_s = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while True:
        # The clock is read first: a condition that became true while this process had no processor counts.
        is_over = time.monotonic() >= deadline
        if (result := condition()) or is_over:
            return result
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def until(condition: Callable[[], _T | None], what: str | Callable[[], object] = "", timeout_s: float = 120) -> _T:
    """Return the first true result of `condition`. Raises AssertionError with `what` after `timeout_s`."""
    if result := poll(condition, timeout_s):
        return result
    raise AssertionError(f"not in {timeout_s:g} s: {(what if isinstance(what, str) else what()) or 'the condition'}")


def all_the_time(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether `condition` is true all the time for `seconds`."""
    return not poll(lambda: not condition(), seconds)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def ends(pid: int) -> bool:
    """Wait for the end of any process, and return whether it came within a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor, closefd=True)):
        return bool(select.select([descriptor], [], [], 60)[0])


def free_port() -> int:
    """Return a port of loopback on which nothing listens."""
    while True:
        # Linux gives outgoing connections ports from 32768 on, also between the end of a server and its next start.
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def listens(port: int) -> bool:
    """Return whether a process listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def require_listening(child: Child, port: int, timeout_s: float) -> None:
    """Wait until `child` listens on a port of this machine. Raises AssertionError with the end of its log."""

    def is_up() -> bool:
        is_there = listens(port)
        assert is_there or child.process.poll() is None, child.log_tail()
        return is_there

    until(is_up, f"a server on port {port}", timeout_s)


def is_idle(pid: int) -> bool:
    """Return whether every thread of a process waits."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        # A thread ended between the listing and the reading.
        return False
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def await_later_file_time(folder: Path) -> None:
    """Wait until farm takes a file that is written in `folder` for later than now: file systems round times down."""
    now_ns, probe = time.time_ns(), folder / f"probe-{uuid.uuid4().hex}"

    def is_later() -> bool:
        probe.touch()
        stat = probe.stat()
        probe.unlink()
        return stat.st_mtime_ns > now_ns + CLOCK_STEP_NS

    until(is_later, "a later file time")
