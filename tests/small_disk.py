"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make `folder`, with room for `size` (as tmpfs takes it: "24m") until the block ends; skip without the right."""
    if os.geteuid():
        pytest.skip("only root can mount a small file system")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "farm-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    try:
        yield folder
    finally:
        # Programs in the folder may take a moment to end.
        until(lambda: not subprocess.run(["umount", folder], capture_output=True, check=False).returncode, "umount")
