"""The soaks of `bench/`, in a shorter form: devices that fail all the time, and runs where everything is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_programs import run_bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.whole
@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_ends_once_with_the_right_verdict_whatever_fails(tmp_path: Path, seed: int) -> None:
    last = run_bench("soak.py", "--seed", str(seed), env={"TMPDIR": str(tmp_path)}, timeout_s=900)
    assert sum(last["verdicts"].values()) == last["jobs"] == 200
    assert last["faults"] > 0
    assert {last[what] for what in ("wrong_blame", "lost", "duplicated", "orphans")} == {0}


@pytest.mark.whole
def test_runs_that_are_tormented_end_and_lose_nothing(tmp_path: Path) -> None:
    last = run_bench("soak.py --chaos", env={"TMPDIR": str(tmp_path)}, timeout_s=1800)
    assert last["faults"] > 0
    assert sum(last["verdicts"].values()) == last["jobs"] > 0
    zeros = ("hangs", "wrong_blame", "wrong_cause", "lost", "duplicated", "orphans", "quarantined_locally")
    assert {what: last[what] for what in zeros} == dict.fromkeys(zeros, 0)
    assert last["longest_wait_s"] < last["bound_s"]
