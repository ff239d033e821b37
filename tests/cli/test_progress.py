"""Progress of a run on a terminal, and its lines after Ctrl-C."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from terminals import terminal_of

from farm.cli.progress import LiveFront

# A run's display and its signals, with nothing behind them. signal.pause() would miss a signal that comes just before.
RUN = """
import logging, time
from farm.cli.output import begin_log
from farm.cli.progress import make_front
from farm.base.interrupts import InterruptHandler

begin_log()
log = logging.getLogger("farm.dispatch.run")
with InterruptHandler() as interrupts:
    try:
        with make_front() as front:
            front.begin(jobs=4, to_build=3, devices=["phone-1", "phone-2"])
            front.devices({"phone-1": "s/conv[SM8650]"})
            with interrupts.finishing(lambda: None, "Ctrl-C again stops, --resume goes on"):
                log.info("jobs run")
                while True:
                    time.sleep(0.1)
    except KeyboardInterrupt:
        print("the end", flush=True)
"""

LAST_ROW = r"phone-2\S* \S*idle +\S*$"


def screen_of(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end: text, line ends, up and erased lines are all that there is."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        else:
            assert part[-1] in "mhl", part
    return [line.rstrip() for line in lines if line.strip()]


def test_ctrl_c_tells_a_second_one_and_resume_and_leaves_no_bar(tmp_path: Path) -> None:
    with terminal_of("-c", RUN, env=os.environ, cwd=tmp_path) as terminal:
        # A terminal drops output that waits when Ctrl-C comes: it comes between two drawings of the bars.
        for line in ("jobs run", "--resume goes on"):
            terminal.read_until(f"(?s){line}.*{LAST_ROW}")
            terminal.write(b"\x03")
        assert terminal.close() == 0
    screen = screen_of(terminal.shown.decode())
    assert "Ctrl-C again stops, --resume goes on" in screen
    assert screen[-1] == "the end"
    assert not [line for line in screen if "0/4" in line or "━" in line], screen


def test_80_columns_show_the_time_left_and_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    front = LiveFront(console)
    now = 1000.0
    monkeypatch.setattr("farm.cli.progress.time.monotonic", lambda: now)
    front.begin(jobs=425, to_build=425, devices=["virtual-SM8650-0"])
    front.live.stop()
    for number in range(20):
        now += 60
        known = "#1: weak" if number < 2 else ""
        shown = {"job_id": f"s/{number}", "verdict": "failed" if known else "passed", "reason": "x"}
        front.job_ended({**shown, "known_issue": known})
    console.file = io.StringIO()
    console.print(front.live.get_renderable())
    [line] = [line for line in console.file.getvalue().splitlines() if line.startswith("run")]
    assert line.rstrip().split("20/425")[1].split("  ") == [" about 6 h 45 min left", "18 passed", "2 known issues"]
