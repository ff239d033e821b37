"""Output of farm into a pipe, a file or CI: whole lines, and a run that goes on after its reader has left."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest
from farm_home import FarmHome
from waiting import Started

from farm.base.user import user_name
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

JOB = Job(Case("s", "conv", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
REASON = f"output 0 against fp32: {'the channel differs, ' * 10}THE POINT"


@pytest.fixture
def red(home: FarmHome) -> FarmHome:
    """A home with two runs, in the newer of which the job fails for a long reason."""
    home.state.mkdir(parents=True)
    with open_store(home.state / "farm.db") as store:
        for age, verdict in ((2, Verdict.PASSED), (1, Verdict.FAILED)):
            began = time.time_ns() // 1_000_000 - age * 3_600_000
            run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", {"executorch": "1.5.1"}, began))
            store.plan_jobs(run_id, [JOB])
            failed = verdict is Verdict.FAILED
            stage = Stage.NUMERICS if failed else Stage.DONE
            store.record_attempt(run_id, Attempt(JOB.id, verdict, stage, REASON if failed else "", started_ms=began))
            store.finish_run(run_id, int(failed))
    return home


def environment(home: FarmHome, columns: str = "") -> dict[str, str]:
    kept = {name: value for name, value in home.env.items() if name != "COLUMNS"}
    return {**kept, **({"COLUMNS": columns} if columns else {})}


def piped(home: FarmHome, *arguments: str, columns: str = "") -> str:
    """Return the output of a command into a pipe."""
    argv = [sys.executable, "-m", "farm.cli.main", *arguments]
    done = subprocess.run(
        argv, env=environment(home, columns), cwd=home.cwd, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


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
    assert "THE POINT" in piped(red, *command)
    narrow = piped(red, *command, columns="60")
    assert "THE POINT" not in narrow
    assert "output 0 against" in narrow


def test_a_terminal_gets_lines_that_fit(red: FarmHome) -> None:
    ours, theirs = pty.openpty()
    argv = ["stty", "cols", "70"]
    subprocess.run(argv, stdin=theirs, check=True)
    argv = [sys.executable, "-m", "farm.cli.main", "report"]
    with Started(argv, env=environment(red), cwd=red.cwd, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    assert process.returncode == 0
    lines = shown.decode().splitlines()
    assert any("the channel differs" in line for line in lines)
    assert "THE POINT" not in shown.decode()
    assert max(len(line) for line in lines if "the channel" in line) <= 70


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        # Linux reports a closed other end by EIO.
        return b""


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("devices",),
        *(pytest.param(one, marks=pytest.mark.whole) for one in (("report", "--json"), ("--help",))),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly_as_it_would_have(
    red: FarmHome, arguments: tuple[str, ...]
) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    argv = [sys.executable, "-m", "farm.cli.main", *arguments]
    done = subprocess.run(
        argv, env=environment(red), cwd=red.cwd, stdout=ours, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, "")
