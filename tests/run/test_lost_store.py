"""Store deleted, replaced or overwritten during a run: the run ends at once, with a message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from farm_home import wait_for_no_process
from stub_home import make_stub_home, write_stub_suite
from waiting import until

RUN = ("run", "--soc", "SM8650", "--virtual", "2", "--suite", "./mine")


def _overwrite(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(lambda path: path.unlink(), "was deleted or moved away while it was in use", id="deleted"),
        pytest.param(_overwrite, "was overwritten or cut off while it was in use", id="overwritten"),
    ],
)
def test_a_run_whose_store_is_lost_stops(tmp_path: Path, act: Callable[[Path], object], message: str) -> None:
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {f"case{number}": 600 for number in range(8)})
    path = home.state / "farm.db"
    assert home.farm(*RUN, "-k", "case0", timeout_s=600).returncode == 0
    before = len(home.rows("select id from attempt"))
    with home.running(*RUN) as process:
        until(lambda: len(home.rows("select id from attempt")) > before, "a recorded attempt")
        act(path)
        there = path.exists()
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 4, output
    assert f"the run stops: the store: {path}: {message}" in output
    assert "Traceback" not in output
    # The jobs that were left are not tried one after the other.
    assert output.count(" ok ") < 8
    assert path.exists() == there
    assert wait_for_no_process(home) == {}
