"""Lets every Python process of a tormented farm write its stacks into a file when it gets SIGUSR1."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

if folder := os.environ.get("CHAOS_STACKS"):
    with contextlib.suppress(OSError):
        # Open as long as the process lives: there may be no room, and no descriptor, when it is needed.
        faulthandler.register(signal.SIGUSR1, Path(folder, f"{os.getpid()}.txt").open("a"))  # noqa: SIM115
