"""The soaks in a shorter form: devices that fail all the time, and runs where everything is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def soak(*arguments: str, scratch: Path) -> dict[str, Any]:
    """Run soak.py with `--quick`, and return its last line."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("soak.py"), *arguments, "--quick"],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


@pytest.mark.whole
def test_every_job_ends_once_with_the_right_verdict_whatever_fails(tmp_path: Path) -> None:
    last = soak(scratch=tmp_path)
    assert sum(last["verdicts"].values()) == last["jobs"] == 100
    assert last["faults"] > 0
    assert {last[what] for what in ("wrong_verdict", "lost", "duplicated", "orphans")} == {0}


@pytest.mark.whole
def test_runs_that_are_tormented_end_and_lose_nothing(tmp_path: Path) -> None:
    last = soak("--chaos", scratch=tmp_path)
    assert last["faults"] > 0
    assert sum(last["verdicts"].values()) == last["jobs"] > 0
    zeros = ("hangs", "wrong_verdict", "wrong_cause", "lost", "duplicated", "orphans", "quarantined_locally")
    assert {what: last[what] for what in zeros} == dict.fromkeys(zeros, 0)
    assert last["longest_wait_s"] < last["bound_s"]
