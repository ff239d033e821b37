"""Devices that are hardware by all they say, where the tests run on a machine of another processor."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_UNAME = """#!/bin/sh
[ "$*" = -m ] && echo aarch64 && exit
exec /bin/uname "$@"
"""


@contextlib.contextmanager
def of_an_arm(tools: Path) -> Iterator[None]:
    """Let what has its programs in `tools` say meanwhile that its processor is an Arm."""
    program = tools / "uname"
    program.write_text(_UNAME)
    program.chmod(0o755)
    try:
        yield
    finally:
        program.unlink()
