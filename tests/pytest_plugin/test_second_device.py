"""A failure that may be the device's is tried on another device, as in a run: real workers, no program."""

from __future__ import annotations

import pytest
from farm_home import FarmHome
from pytest_sessions import jobs_of, run_tests

from farm.results.attempt import Cause, Verdict

SUITE = """
from pathlib import Path

import pytest

from farm.base.errors import ProgramError

REFUSED = ProgramError("load: refused", stage="load", cause="refused")


@pytest.mark.parametrize("n", range(3))
def test_refused_by_one(device, n):
    first = Path(f"first-{n}")
    if not first.exists():
        first.write_text(device.serial)
    if first.read_text() == device.serial:
        raise REFUSED


def test_refused_by_all(device):
    raise REFUSED


def test_refused_and_caught(device):
    with pytest.raises(ProgramError):
        raise REFUSED
    assert device.soc == "SM8650"
"""


def attempts(home: FarmHome) -> dict[str, list[tuple[Verdict, Cause]]]:
    """Return verdicts and causes by the names of the tests, which no device tried twice."""
    jobs = jobs_of(home)
    for job in jobs.values():
        assert len({attempt.device for attempt in job.attempts}) == len(job.attempts), job.id
    return {name: [(attempt.verdict, attempt.cause) for attempt in job.attempts] for name, job in jobs.items()}


@pytest.mark.whole
def test_another_device_decides_whether_a_refusal_is_the_code(home: FarmHome) -> None:
    done = run_tests(home, SUITE, devices=2, code=1)
    refused, passed = (Verdict.INFRA, Cause.REFUSED), (Verdict.PASSED, Cause.NONE)
    assert attempts(home) == {
        **{f"test_refused_by_one[{number}]": [refused, passed] for number in range(3)},
        "test_refused_by_all": [refused, (Verdict.FAILED, Cause.REFUSED)],
        "test_refused_and_caught": [passed],
    }
    assert "1 failed, 4 passed, 4 rerun" in done.stdout, done.stdout[-3000:]


MOVES = """
import subprocess
from pathlib import Path

import pytest

from farm.base.errors import DeviceGoneError


@pytest.mark.xfail(reason="ticket 7")
def test_expected(device):
    first = Path("expected")
    if not first.exists():
        first.write_text(device.serial)
        raise DeviceGoneError(device.serial, "its cable is loose")
    assert device.serial == first.read_text(), "as expected"


def test_moves(device):
    first = Path("first")
    if not first.exists():
        first.write_text(device.serial)
        subprocess.run(["adb", "reboot"], check=True, timeout=60)
        raise AssertionError("this says nothing of the code")
    assert device.serial != first.read_text()
    said = subprocess.run(["adb", "shell", "getprop", "ro.product.name"], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == device.serial


def test_after(device):
    assert device.run(["true"]).code == 0
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.whole)])
def test_a_test_that_lost_its_device_runs_again_on_the_next(home: FarmHome, workers: str) -> None:
    done = run_tests(home, MOVES, "-n", workers, devices=2, code=0)
    found = attempts(home)
    assert [verdict for verdict, _ in found["test_expected"]] == [Verdict.INFRA, Verdict.FAILED]
    assert found["test_expected"][1][1] is Cause.NONE, "a lost device is expected by no test"
    assert [verdict for verdict, _ in found["test_moves"]] == [Verdict.INFRA, Verdict.PASSED]
    assert found["test_after"] == [(Verdict.PASSED, Cause.NONE)]
    assert "2 passed, 1 xfailed, 2 rerun" in done.stdout, done.stdout[-3000:]
