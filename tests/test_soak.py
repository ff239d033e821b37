"""The soaks of `bench/`, in a shorter form: devices that fail all the time, and runs where everything is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.whole
@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_ends_once_with_the_right_verdict_whatever_fails(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "soak.py"), "--quick", "--seed", str(seed)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert sum(last["verdicts"].values()) == last["jobs"] == 200
    assert last["faults"] > 0
    assert {last[what] for what in ("wrong_blame", "lost", "duplicated", "orphans")} == {0}


@pytest.mark.whole
def test_runs_that_are_tormented_end_and_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "soak.py"), "--chaos", "--quick"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["faults"] > 0
    assert sum(last["verdicts"].values()) == last["jobs"] > 0
    zeros = ("hangs", "wrong_blame", "wrong_cause", "lost", "duplicated", "orphans", "quarantined_locally")
    assert {what: last[what] for what in zeros} == dict.fromkeys(zeros, 0)
    assert last["longest_wait_s"] < last["bound_s"]
