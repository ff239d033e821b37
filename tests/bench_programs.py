"""The programs of `bench/` as docs/performance.md lists them, and how a test runs one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT = Path(__file__).parents[1]
BENCH = _ROOT / "bench"
_ROW = re.compile(r"^\| `(\w+\.py(?: --\w+)?)` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)


def documented_keys() -> dict[str, set[str]]:
    """Return the keys of each program's last line, by its name with what else it is called with: `soak.py --chaos`."""
    text = (_ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    return {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in _ROW.findall(text)}


def run_bench(program: str, *arguments: str, env: Mapping[str, str], timeout_s: float = 1500) -> dict[str, Any]:
    """Run a program with `--quick`, and return its last line: JSON with the documented keys, no more and no fewer."""
    name, *more = program.split()
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *more, "--quick", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == documented_keys()[program]
    return last
