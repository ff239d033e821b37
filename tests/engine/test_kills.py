"""kill -9 of one part while a run works: the rest carries on, nothing that was finished is lost or left over."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from farm_home import FarmHome, processes_of, wait_for_no_process

if TYPE_CHECKING:
    from collections.abc import Callable

RUN = ("run", "--soc", "SM8650", "--virtual", "2", "--suite", "smoke")


def attempts(home: FarmHome) -> list[tuple[int, str]]:
    try:
        with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
            return connection.execute("select id, verdict from attempt order by id").fetchall()
    except sqlite3.Error:
        return []


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"never: {what}")
        time.sleep(0.05)


@pytest.fixture
def compiled(home: FarmHome) -> FarmHome:
    """The bundles are there, so that what follows is about running."""
    done = home.farm(*RUN, timeout_s=300)
    assert done.returncode == 0, done.stderr
    (home.state / "farm.db").unlink()
    return home


@pytest.mark.parametrize(
    ("victim", "exit_codes"),
    [("exec(eval(sys.stdin.readline()))", {0}), ("--serve", {0}), ("farm.virtual", {4}), ("server nodaemon", {4})],
    ids=["worker", "runner", "virtual device", "adb server"],
)
def test_the_run_ends_by_itself_and_keeps_what_was_finished(
    compiled: FarmHome, victim: str, exit_codes: set[int]
) -> None:
    home = compiled
    process = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", *RUN, "--iterations", "300"],
        env=home.env, cwd=home.cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        until(lambda: attempts(home), "a first attempt")
        finished = attempts(home)
        pids = [pid for pid, command in processes_of(home).items() if victim in command]
        assert pids, processes_of(home)
        os.kill(pids[0], signal.SIGKILL)
        said = process.stdout.read().decode()
        code = process.wait(120)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    ended = attempts(home)
    assert code in exit_codes, said
    assert ended[: len(finished)] == finished
    assert {verdict for _, verdict in ended} <= {"passed", "infra"}, said
    assert "Traceback" not in said
    assert wait_for_no_process(home) == {}
