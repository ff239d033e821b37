"""A failure that may be the device's is tried on another device, as in a run: real workers, no program."""

from __future__ import annotations

import pytest
from farm_home import FarmHome

from farm.results.attempt import Cause, Verdict
from farm.store.store import open_store

# Other plugins of this environment take pytest longer to import than it takes to run these tests.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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


def attempts(home: FarmHome, case: str) -> list[tuple[Verdict, Cause]]:
    with open_store(f"sqlite:///{home.state}/farm.db") as store:
        [job] = [job for job in store.runs.view(store.runs.resolve("latest")).jobs if job.case.endswith(case)]
    assert len({attempt.device for attempt in job.attempts}) == len(job.attempts), "no device tries it twice"
    return [(attempt.verdict, attempt.cause) for attempt in job.attempts]


@pytest.mark.whole
def test_another_device_decides_whether_a_refusal_is_the_code(home: FarmHome) -> None:
    (home.cwd / "test_two.py").write_text(SUITE)
    asked = ("pytest", "--soc", "SM8650", "--virtual", "2", "--", "-p", "no:cacheprovider", "test_two.py")
    done = home.farm(*asked, timeout_s=300, env=ALONE, code=1)
    for number in range(3):
        assert attempts(home, f"test_refused_by_one[{number}]") == [
            (Verdict.INFRA, Cause.REFUSED), (Verdict.PASSED, Cause.NONE),
        ]  # fmt: skip
    assert attempts(home, "test_refused_by_all") == [(Verdict.INFRA, Cause.REFUSED), (Verdict.FAILED, Cause.REFUSED)]
    assert attempts(home, "test_refused_and_caught") == [(Verdict.PASSED, Cause.NONE)]
    assert "1 failed, 4 passed, 4 rerun" in done.stdout, done.stdout[-3000:]


MOVES = """
import subprocess
from pathlib import Path


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
    (home.cwd / "test_two.py").write_text(MOVES)
    words = ("-n", workers, "-p", "no:cacheprovider", "test_two.py")
    done = home.farm("pytest", "--soc", "SM8650", "--virtual", "2", "--", *words, timeout_s=300, env=ALONE, code=0)
    lost, passed = attempts(home, "test_moves")
    assert (lost[0], passed) == (Verdict.INFRA, (Verdict.PASSED, Cause.NONE))
    assert attempts(home, "test_after") == [(Verdict.PASSED, Cause.NONE)]
    assert "2 passed, 1 rerun" in done.stdout, done.stdout[-3000:]


@pytest.mark.whole
def test_what_another_device_passed_is_no_failure(home: FarmHome) -> None:
    (home.cwd / "test_two.py").write_text(SUITE)
    asked = (
        "pytest",
        "--soc",
        "SM8650",
        "--virtual",
        "2",
        "--",
        "-k",
        "by_one",
        "-p",
        "no:cacheprovider",
        "test_two.py",
    )
    home.farm(*asked, timeout_s=300, env=ALONE, code=0)
