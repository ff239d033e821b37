"""Output of farm into a pipe, a file or CI: whole lines, and a run that goes on after its reader has left."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from farm_home import FarmHome
from made_runs import HOUR_MS, record_run
from terminals import terminal_of

from farm.results.attempt import Verdict
from farm.store.store import open_store

REASON = f"output 0 against fp32: {'the channel differs, ' * 10}THE POINT"


@pytest.fixture
def red(home: FarmHome) -> FarmHome:
    """A home with two runs, in the newer of which the job fails for a long reason."""
    home.state.mkdir(parents=True)
    now_ms = time.time_ns() // 1_000_000
    with open_store(home.state / "farm.db") as store:
        record_run(store, started_ms=now_ms - 2 * HOUR_MS)
        record_run(
            store, verdicts=[Verdict.FAILED], started_ms=now_ms - HOUR_MS, attempt={"reason": REASON}, exit_code=1
        )
    return home


def environment(home: FarmHome) -> dict[str, str]:
    return {name: value for name, value in home.env.items() if name != "COLUMNS"}


def piped(env: dict[str, str], *arguments: str) -> str:
    """Return the output of a command into a pipe."""
    argv = [sys.executable, "-m", "farm.cli.main", *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.mark.parametrize(
    "command",
    [
        ("report",),
        pytest.param(("status",), marks=pytest.mark.whole),
        pytest.param(("diff", "latest~1"), marks=pytest.mark.whole),
    ],
)
def test_a_pipe_gets_the_whole_reason_unless_somebody_says_how_wide_it_is(
    red: FarmHome, command: tuple[str, ...]
) -> None:
    assert "THE POINT" in piped(environment(red), *command)
    narrow = piped({**red.env, "COLUMNS": "60"}, *command)
    assert "THE POINT" not in narrow
    assert "output 0 against" in narrow


def test_a_terminal_gets_lines_that_fit(red: FarmHome) -> None:
    with terminal_of("report", env=environment(red), cwd=red.cwd, columns=70) as terminal:
        assert terminal.close() == 0
    shown = terminal.shown.decode()
    assert "THE POINT" not in shown
    assert 0 < max(len(line) for line in shown.splitlines() if "the channel" in line) <= 70


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices",),
        *(pytest.param(one, marks=pytest.mark.whole) for one in (("status",), ("report", "--json"), ("--help",))),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly_as_it_would_have(
    red: FarmHome, arguments: tuple[str, ...]
) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    with red.start_alone(*arguments, stdout=ours, text=True) as process:
        os.close(ours)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
