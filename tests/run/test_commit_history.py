"""`farm bisect --commits` over 24 commits of a real checkout: worktrees, builders and the simulator are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from bisected_history import COMPILE, IMPORT, JOBS, NUMERICS, SLOWER, make_history
from executorch_checkout import run_git
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

MOST = 6
"""Commits that may be compiled, the ends among them."""


class Bisected:
    """The checkout, and `farm bisect` over it."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.state = folder / "executorch", folder / "state"
        self.first, self.defects = make_history(self.checkout)
        self.env = os.environ | {"FARM_STATE_DIR": str(self.state), "FARM_STORE": f"sqlite:///{folder / 'farm.db'}"}

    def command(self, defect: str) -> list[str]:
        # What cannot be imported is put right by the next commit.
        bad = self.defects[IMPORT] if defect == IMPORT else "HEAD"
        span = ["--commits", f"{self.first}..{bad}", "--checkout", str(self.checkout)]
        return [sys.executable, "-m", "farm.cli.main", "bisect", *span, "--virtual", "--json", JOBS[defect]]

    def run(self, defect: str) -> dict[str, Any]:
        done = subprocess.run(self.command(defect), env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 3, done.stdout + done.stderr
        return json.loads(done.stdout)

    def known(self) -> list[int]:
        """Return the commits that the newest bisection has compiled."""
        files = sorted(self.state.glob("bisects/*/state.json"))
        return json.loads(files[-1].read_text())["compiled"] if files else []


@pytest.fixture(scope="module")
def bisected(tmp_path_factory: pytest.TempPathFactory) -> Bisected:
    return Bisected(tmp_path_factory.mktemp("history"))


def check(bisected: Bisected, defect: str, answer: dict[str, Any]) -> None:
    [job] = answer["jobs"]
    assert job["first_bad"]["sha"] == bisected.defects[defect], job
    assert job["exact"]
    assert len(answer["compiled_commits"]) <= MOST
    assert run_git(bisected.checkout, "status", "--porcelain") == ""
    assert run_git(bisected.checkout, "worktree", "list").count("\n") == 1


# Each kind of question has a search over a stub of the lab in test_commit_bisect.py; the slower one is found below.
@pytest.mark.soak
@pytest.mark.parametrize(("defect", "kind"), [(NUMERICS, "verdict"), (COMPILE, "compile"), (IMPORT, "import")])
def test_the_commit_of_each_defect_is_named(bisected: Bisected, defect: str, kind: str) -> None:
    answer = bisected.run(defect)
    check(bisected, defect, answer)
    assert answer["jobs"][0]["question"]["kind"] == kind


@pytest.mark.whole
def test_after_a_kill_midway_nothing_is_compiled_twice(bisected: Bisected) -> None:
    before = bisected.known()
    with subprocess.Popen(
        bisected.command(SLOWER), env=bisected.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as killed:

        def known_soon() -> Any:
            assert killed.poll() is None, "it ended before it could be killed"
            known = bisected.known()
            return len(known) >= 3 and known != before and known

        known = until(known_soon, "three known commits", 900.0)
        os.kill(killed.pid, signal.SIGKILL)
    answer = bisected.run(SLOWER)
    check(bisected, SLOWER, answer)
    shas = [answer["commits"][index] for index in known]
    assert answer["compiled_commits"][: len(shas)] == shas
    # Pairs on a busy simulator may stay open; the larger program is the evidence then.
    question = answer["jobs"][0]["question"]
    assert (question["kind"], question["metric"]) in {
        ("interleaved pairs", "htp_cycles"), ("interleaved pairs", "latency"), ("exact number", "pte_size"),
    }, question  # fmt: skip
