"""Waits of tests: the one loop that polls, and the end of a process by its descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
# A short wait costs milliseconds; a long one leaves the processors to the processes under test.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


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


def until(condition: Callable[[], _T], what: str | Callable[[], object] = "", timeout_s: float = 120) -> _T:
    """Return the first true result of `condition`. Raises AssertionError with `what` after `timeout_s`."""
    if result := poll(condition, timeout_s):
        return result
    raise AssertionError(f"not in {timeout_s:g} s: {(what if isinstance(what, str) else what()) or 'the condition'}")


def stays(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether `condition` is true all the time for `seconds`."""
    return not poll(lambda: not condition(), seconds)


def ends(pid: int, timeout_s: float = 60) -> bool:
    """Wait for the end of any process, and return whether it came within `timeout_s`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor, closefd=True)):
        return bool(select.select([descriptor], [], [], timeout_s)[0])
