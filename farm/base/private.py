"""Secrets in the environment of this process, hidden from other processes of its user."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_DUMPABLE = 4
"""Option of prctl(2)."""


def hide_environment() -> None:
    """Keep other processes of this user from reading environment and memory of this process, as in /proc/PID/environ.

    Programs that it starts are not hidden. On Linux alone. Raises OSError.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
