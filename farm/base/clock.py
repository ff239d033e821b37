"""A clock that the processes of one machine share."""

from __future__ import annotations

import time


def now_s() -> float:
    """Return seconds on a clock that all processes of this machine share, and that goes on while it sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
