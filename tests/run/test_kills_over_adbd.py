"""kill -9 of all of farm at six moments of a run, over Android's own adbd: no program stays on the device."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest
from adbd_system import need_adbd, processes_on
from attached import Attached, attach
from stub_home import make_stub_home, write_stub_suite
from waiting import poll, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.whole

RUN = ("run", "--soc", "SM8650", "--suite", "./mine")
QUICK = (*RUN, "-k", "quick")
MOMENTS = 6


@pytest.fixture
def device(tmp_path: Path, farm_cache: Path) -> Iterator[Attached]:
    home = make_stub_home(tmp_path / "stub")
    write_stub_suite(home, "mine", {"long0": 5000, "long1": 5000, "quick": 20})
    with attach(home, tmp_path, ["SM8650"], android=need_adbd(farm_cache)) as attached:
        yield attached


def test_no_program_stays_whenever_farm_is_killed(device: Attached) -> None:
    assert device.farm(*QUICK, timeout_s=300).returncode == 0

    def programs() -> list[str]:
        return sorted(processes_on(device.root(0)).values())

    idle = programs()
    for moment in range(MOMENTS):
        # Half of them before the runner is there, half of them while it executes.
        wanted = "--serve" if moment % 2 else ""
        with device.running(*RUN, "-k", "long") as process:
            until(lambda: any(wanted in one for one in programs() if one not in idle), f"a program {wanted}")  # noqa: B023
            poll(lambda: process.poll() is not None, 0.25 * moment)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        until(lambda: programs() == idle, f"an idle device after {moment}", 30)
    # And it is of use to the next one.
    assert device.farm(*QUICK, timeout_s=300).returncode == 0
