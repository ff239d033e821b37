"""Each command that tests call in their process or in a fork answers there as in an interpreter of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome, processes_of
from forked_command import FORKED
from waiting import Started

PUBLISHES = """
import sys
from forks import publish
publish([], {"OTHER": "x" * 100_000, "FARM_STATE_DIR": sys.argv[1]})
print("published", flush=True)
sys.stdin.read()
"""

CALLS = {
    "alerts": "assign 1", "data export": "latest", "data import": "none.jsonl",
    "debug": "none/add", "devices check": "none", "devices disable": "none", "devices enable": "none",
    "devices label": "none", "devices lease": "--device R5CX1", "devices list": "--json",
    "devices name": "none desk", "devices release": "R5CX1", "devices remove": "none", "devices show": "R5CX1",
    "devices socs": "--json", "devices unquarantine": "none", "diff": "latest~1 latest", "doctor": "--soc SM1",
    "exec": "none.pte", "history": "smoke/*", "jobs": "bundle smoke/add out", "lab accounts": "",
    "lab agent drain": "none", "lab agent list": "", "lab notify": "--json", "lab queue": "", "lab quota": "",
    "lab roles": "", "lease": "--device R5CX1", "nightly": "none.toml", "perf baseline": "*",
    "perf bisect": "smoke/add", "perf confirm": "smoke/add", "perf diff": "latest~1 latest",
    "pytest": "--virtual 1 -- tests", "report": "latest", "run": "--soc SM1", "runs cancel": "latest",
    "runs list": "", "runs prune": "--keep '3 fortnights'", "runs remove": "latest", "runs show": "latest",
    "setup": "cache show --help", "show": "smoke/add", "status": "", "suites": "smoke",
    "virtual clear": "none --yes", "virtual fault": "none stall", "virtual faults": "",
}  # fmt: skip
"""Command -> its arguments."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[pytest.mark.soak] if place % 10 else []) for place, one in enumerate(sorted(FORKED))],
)
def test_the_answers_of_a_fork_and_of_an_interpreter_are_equal(command: str, home: FarmHome) -> None:
    def answer(*, forked: bool) -> tuple[int, str, str]:
        done = home.farm(*shlex.split(f"{command} {CALLS[command]}"), forked=forked)
        return done.returncode, done.stdout, done.stderr

    assert answer(forked=True) == answer(forked=False)


def test_a_fork_ends_in_time(home: FarmHome) -> None:
    # A pipe without a writer: the command waits for ever.
    os.mkfifo(home.cwd / "runs.jsonl")
    with pytest.raises(subprocess.TimeoutExpired):
        home.farm("data", "import", "runs.jsonl", timeout_s=0.2)
    assert home.farm("status").returncode == home.farm("status", forked=False).returncode


def test_a_fork_that_is_left_over_is_found_by_its_folders(home: FarmHome) -> None:
    # The folder is no argument, as a fork has the arguments of the process that forked it.
    code = f"import sys; sys.argv[1:] = [{str(home.state.parent)!r} + '/' + 'state']{PUBLISHES}"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTEST_"))}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    with Started([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"published\n"
        assert set(processes_of(home)) == {process.pid}
        process.communicate()
    assert process.returncode == 0
