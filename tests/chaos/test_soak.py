"""Devices that fail all the time, and runs where everything is killed: the runner is a stub, all else is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome, processes_of
from stub_farm import make_stub_farm
from stub_run import judge, run_stub_farm

from farm.base.processes import Supervisor

# Code that is at fault, of 5,000 jobs.
PLANTED = {"wrong": 60, "crash": 20, "hang": 10, "refused": 30}


@pytest.mark.parametrize(
    ("devices", "jobs"),
    [pytest.param(4, 100, marks=pytest.mark.whole), pytest.param(32, 5000, marks=pytest.mark.soak)],
)
def test_every_job_ends_once_with_the_right_verdict_whatever_fails(tmp_path: Path, devices: int, jobs: int) -> None:
    planted = {word: max(1, count * jobs // 5000) for word, count in PLANTED.items()}
    with Supervisor() as supervisor:
        farm = make_stub_farm(
            tmp_path, devices=devices, jobs=jobs, latency_ms=50, planted=planted, supervisor=supervisor,
            fault_rate=0.05, fault_seed=1,
        )  # fmt: skip
        done = run_stub_farm(farm, tmp_path, timeout_s=2.0)
        assert farm.fired()
    assert judge(done.view, farm.behaviours) == {"wrong_verdict": [], "lost": [], "duplicated": []}
    assert len([job for job in done.view.jobs if job.attempts]) == jobs
    assert done.leases == []
    assert processes_of(FarmHome(tmp_path, tmp_path, tmp_path)) == {}


@pytest.mark.whole
def test_disturbed_runs_end_and_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("chaos.py"), "--quick"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["faults"] > 0
    assert sum(last["verdicts"].values()) == last["jobs"] > 0
    zeros = ("hangs", "wrong_verdict", "wrong_cause", "lost", "duplicated", "orphans", "quarantined_locally")
    assert {what: last[what] for what in zeros} == dict.fromkeys(zeros, 0)
    assert last["longest_wait_s"] < last["bound_s"]
