"""Each command that tests run in a fork answers there as in an interpreter of its own."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from forked_command import FORKED

if TYPE_CHECKING:
    from farm_home import FarmHome

CALLS = {
    "baseline": ["show", "*"],
    "bundle": ["smoke/add", "out"],
    "cache": ["show", "--json"],
    "cancel": ["latest"],
    "completion": ["bash"],
    "coverage": ["--soc", "SM8650", "--suite", "smoke"],
    "device": ["show", "R5CX1"],
    "devices": ["--json"],
    "diff": ["latest~1", "latest"],
    "doctor": ["--soc", "SM1"],
    "export": ["latest"],
    "history": ["smoke/*"],
    "import": ["none.jsonl"],
    "lease": ["--device", "R5CX1"],
    "notify": ["--json"],
    "profile": ["smoke/add"],
    "prune": ["--keep", "3 fortnights"],
    "queue": [],
    "quota": [],
    "release": ["R5CX1"],
    "report": ["latest"],
    "runtime": ["--soc"],
    "sdk": ["list"],
    "show": ["smoke/add"],
    "sign": ["--soc", "SM8650"],
    "socs": ["--json"],
    "sql": ["SELECT id FROM run"],
    "status": [],
    "store": ["roles"],
    "suites": ["smoke"],
    "toolchain": ["--help"],
    "triage": ["1"],
}


@pytest.mark.parametrize("command", sorted(FORKED))
def test_the_answers_of_a_fork_and_of_an_interpreter_are_equal(command: str, home: FarmHome) -> None:
    def answer(*, forked: bool) -> tuple[int, str, str]:
        done: subprocess.CompletedProcess[str] = home.farm(command, *CALLS[command], forked=forked)
        return done.returncode, done.stdout, done.stderr

    assert answer(forked=True) == answer(forked=False)


def test_a_fork_ends_in_time(home: FarmHome) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        home.farm("status", timeout_s=0)
    assert home.farm("status").returncode == home.farm("status", forked=False).returncode
