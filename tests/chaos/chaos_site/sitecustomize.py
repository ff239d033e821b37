"""Lets every Python process of a tormented farm write its stacks into a file when it gets SIGUSR1."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path


def _register() -> None:
    with contextlib.suppress(OSError):
        # Open as long as the process lives: there may be no room, and no descriptor, when it is needed.
        file = Path(os.environ["CHAOS_STACKS"], f"{os.getpid()}.txt").open("a")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file)


if "CHAOS_STACKS" in os.environ:
    _register()
    os.register_at_fork(after_in_child=_register)
