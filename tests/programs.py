"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_program(
    argv: Sequence[str | Path], *, timeout_s: float = 600, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its result with the output; `options` are passed to subprocess.run.

    Raises AssertionError for an exit code other than 0.
    """
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    require_code(done, 0)
    return done


def require_code(done: subprocess.CompletedProcess[str], code: int | None) -> None:
    """Raise AssertionError with the end of a program's output for an exit code other than `code`, unless it is None."""
    output = f"{done.args}: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert code is None or done.returncode == code, output
