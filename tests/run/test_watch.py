"""`farm run --watch`: an edit runs the jobs concerned, a mistake is reported, Ctrl-C ends it with nothing left."""

from __future__ import annotations

import os
import signal
import threading
from typing import IO

import pytest
from farm_home import FarmHome, wait_for_no_process
from in_process import refusal
from waiting import until

RUN = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--virtual", "1", "--suite", "./mine", "--watch")
SUITE = """
[suite]
name = "mine"
description = "two jobs"
precisions = ["fp32"]
"""
CASE = """
[case.{name}]
module = "torch.nn:Hardtanh"
kwargs = {{ min_val = -{limit}, max_val = {limit} }}
inputs = [{{ shape = [1, 8] }}]
"""
WAITING = "waiting for a change"


class Lines(threading.Thread):
    """Output of a process while it runs."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__(daemon=True)
        self._pipe, self.text = pipe, ""
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self.text += line

    def wait_for(self, words: str, times: int) -> str:
        until(lambda: self.text.count(words) >= times, lambda: f"{words}: {self.text}", 240)
        return self.text


def write(home: FarmHome, **limits: float) -> None:
    folder = home.cwd / "mine"
    folder.mkdir(exist_ok=True)
    cases = "".join(CASE.format(name=name, limit=limit) for name, limit in limits.items())
    (folder / "suite.toml").write_text(SUITE + cases)


@pytest.mark.whole
def test_an_edit_runs_what_it_concerns_and_ctrl_c_ends_it(home: FarmHome) -> None:
    write(home, one=1.25, two=2.25)
    with home.running(*RUN) as process:
        assert process.stdout is not None
        lines = Lines(process.stdout)
        assert "2 passed" in lines.wait_for(WAITING, 1)
        write(home, one=1.25, two=2.75)
        text = lines.wait_for(WAITING, 2)
        assert "changed: suite.toml" in text
        assert "1 of 2 jobs are concerned, 1 bundles to compile: mine/two[" in text
        assert "1 passed" in text
        # An invalid suite is reported, and the command waits for the next change.
        (home.cwd / "mine" / "suite.toml").write_text("[suite")
        assert "suite.toml" in lines.wait_for(WAITING, 3).split(WAITING)[2]
        write(home, one=1.25, two=2.75)
        assert "none of 2 jobs is concerned" in lines.wait_for(WAITING, 4)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
        assert "Traceback" not in lines.text
    assert wait_for_no_process(home) == {}


def test_json_is_refused() -> None:
    assert refusal(*RUN, "--json") == (2, "--watch runs changed jobs until Ctrl-C: leave --json out")
