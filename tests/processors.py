"""Devices that look like hardware, on a machine with another processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_UNAME = """#!/bin/sh
[ "$*" = -m ] && echo aarch64 && exit
exec /bin/uname "$@"
"""


@contextlib.contextmanager
def of_an_arm(tools: Path) -> Iterator[None]:
    """Make devices with their programs in `tools` report an Arm processor inside the block."""
    program = tools / "uname"
    program.write_text(_UNAME)
    program.chmod(0o755)
    try:
        yield
    finally:
        program.unlink()
