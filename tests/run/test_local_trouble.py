"""Failures of this machine or of a single device mark no other device and no code; attached devices are shared."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from attached import attach
from farm_home import FarmHome, processes_of, wait_for_no_process
from small_disk import small_disk
from stub_home import StubHome, make_stub_home, write_stub_suite
from waiting import until

from farm.devices.virtual.faults import Fault, inject
from farm.dispatch.device_forks import PROCESS_NAME

RUN = ("run", "--soc", "SM8650", "--suite", "./mine")
CASES = 6
# The health check's file has 64 bytes, the others' have 1024.
HEALTH_CHECK_BYTES = 500


@pytest.fixture
def home(tmp_path: Path) -> StubHome:
    """Home with a suite of programs that keep a device for half a second; the health check has another program."""
    made = make_stub_home(tmp_path / "stub")
    write_stub_suite(made, "mine", {f"case{number}": 500 + number for number in range(CASES)})
    return made


def fill(folder: Path) -> Path:
    """Leave no room on a file system, and return the file that takes it."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(65536))
        except OSError:
            return file


@pytest.mark.whole
def test_a_full_disk_here_stops_the_run_and_marks_no_device(home: StubHome, tmp_path: Path) -> None:
    (home.cwd / "farm.toml").write_text("[health]\ndisk_wait_s = 2\n")
    with small_disk(tmp_path / "small", "24m") as small, attach(home, tmp_path, ["SM8650", "SM8650"]) as pair:
        own = dataclasses.replace(home, state=small / "state")
        env = {**pair.env, "FARM_STORE": str(tmp_path / "shared.db")}
        own.farm(*RUN, env=env, timeout_s=300, code=0)
        with own.running(*RUN, env=env) as process:
            until(lambda: len(list((small / "state/runs").glob("*/raw"))) == 2, "the first job")
            filler = fill(small)
            out = process.communicate(timeout=120)[0]
        assert process.returncode == 4, out
        for words in ("the run stops: this machine:", "No space left on device", "'farm run --resume"):
            assert words in out
        filler.unlink()
        listed = own.json("devices", env=env)["devices"]
        assert {row["health"] for row in listed} == {"healthy"}
        shown = own.farm("devices", "show", "virtual-SM8650-0", env=env).stdout
        assert "quarantine" not in shown
        assert "No space" not in shown
        own.farm("run", "--resume", "latest", env=env, timeout_s=240, code=0)


def test_a_device_whose_numbers_turn_wrong_after_its_health_check_fails_no_code(home: StubHome, tmp_path: Path) -> None:
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as pair:
        inject(pair.root(0), Fault("wrong_numbers", after_bytes=HEALTH_CHECK_BYTES, times=0))
        jobs = pair.json(*RUN, timeout_s=300)["jobs"]
        assert {job["attempts"][-1]["verdict"] for job in jobs} == {"passed"}
        attempts = [attempt for job in jobs for attempt in job["attempts"]]
        assert {one["verdict"] for one in attempts if one["device"] == "virtual-SM8650-0"} == {"infra"}
        assert any("wrong numbers on virtual-SM8650-0" in note for one in attempts for note in one["notes"])
        shown = pair.farm("devices", "show", "virtual-SM8650-0").stdout
        assert "a job that failed on it passed on virtual-SM8650-1" in shown


# The server of device processes is a program of its own, and Python imports `sitecustomize` at its start.
_KILLS_FORKS = """
import os, signal, sys

if "farm.dispatch.device_forks" in sys.orig_argv:
    forks = []

    def die():
        if len(forks) in (3, 4):
            open(os.path.join(os.environ["MARKS"], str(len(forks))), "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    os.register_at_fork(before=lambda: forks.append(None), after_in_child=die)
"""


@pytest.mark.whole
def test_a_replacement_that_dies_while_it_starts_ends_nothing(home: StubHome, tmp_path: Path) -> None:
    site, marks = tmp_path / "site", tmp_path / "marks"
    for folder in (site, marks):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(_KILLS_FORKS)
    with home.running(*RUN, "--virtual", "2", env={"PYTHONPATH": str(site), "MARKS": str(marks)}) as process:
        # Replacements need remaining work: workers start within milliseconds, and jobs take half a second each.
        os.kill(until(lambda: len(found := workers(home)) == 2 and found, "two workers")[0], signal.SIGKILL)
        out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    assert f"{CASES} passed" in out
    assert {mark.name for mark in marks.iterdir()} == {"3", "4"}
    assert wait_for_no_process(home) == {}


def workers(home: FarmHome) -> list[int]:
    return [pid for pid, command in processes_of(home).items() if PROCESS_NAME in command]
