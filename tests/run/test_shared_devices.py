"""Devices that several users or runs share, and troubles of this machine: real parts on virtual devices."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from attached import Attached, attach
from farm_home import FarmHome, processes_of, wait_for_no_process
from ordinary_server import kill_server
from small_disk import small_disk
from stub_home import StubHome, make_stub_home, next_stub_home, write_stub_suite
from waiting import until

from farm.devices.virtual.faults import Fault, inject
from farm.dispatch.device_forks import PROCESS_NAME

# Devices that several users, or several runs, share, on real parts: virtual devices are attached as phones are.


RUN = ("run", "--soc", "SM8650", "--suite", "./mine")
LONG = ("run", "--soc", "SM8650", "--suite", "./long", "-k", "case0 or case1 or case2")
ALL = ("run", "--soc", "SM8650", "--suite", "./long")
ALL_JOBS = 6
# A job takes longer than a command takes to start, and all of them far longer, also while this machine does other work.
LONG_MS = 1000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> StubHome:
    """Home with the bundles of all jobs and of the health check, so that what follows is about devices."""
    home = make_stub_home(tmp_path_factory.mktemp("compiled") / "stub")
    write_suites(home)
    home.farm(*ALL, "--suite", "./mine", "--virtual", "2", code=0)
    return home


def write_suites(home: StubHome) -> None:
    write_stub_suite(home, "mine", {f"case{number}": 20 + number for number in range(3)})
    write_stub_suite(home, "long", {f"case{number}": LONG_MS + number for number in range(ALL_JOBS)})


@pytest.fixture
def home(compiled: StubHome, tmp_path: Path) -> StubHome:
    made = next_stub_home(compiled, tmp_path / "stub")
    write_suites(made)
    return made


@pytest.fixture
def pair(home: StubHome, tmp_path: Path) -> Iterator[Attached]:
    with attach(home, tmp_path, ["SM8650", "SM8650"]) as attached:
        yield attached


@pytest.fixture
def single(home: StubHome, tmp_path: Path) -> Iterator[Attached]:
    with attach(home, tmp_path, ["SM8650"]) as attached:
        yield attached


def tried(home: FarmHome) -> list[tuple[str, str, str]]:
    """Return job, device and verdict of each attempt."""
    query = "select run_job_id, serial, verdict from attempt join device on device.id = device_id order by attempt.id"
    return home.rows(query)


def verdicts(home: FarmHome) -> list[str]:
    return [verdict for _, _, verdict in tried(home)]


def last_verdicts(home: FarmHome) -> list[str]:
    return list({job: verdict for job, _, verdict in tried(home)}.values())


def has_passed(home: FarmHome, jobs: int) -> bool:
    """Return whether at least so many jobs passed and none was lost, or has been made up for."""
    ended = last_verdicts(home)
    return len(ended) >= jobs and set(ended) == {"passed"}


def leases(attached: Attached) -> dict[str, str]:
    return {row["serial"]: row["holder"] for row in attached.json("devices")["devices"]}


def test_attached_virtual_devices_run_jobs_and_are_given_back(pair: Attached) -> None:
    pair.farm("lease", "virtual-SM8650-1", user="ann", code=0)
    pair.farm("devices", "name", "virtual-SM8650-0", "desk", code=0)
    done = pair.farm(*RUN, "--json", code=0)
    assert "1 device: desk\n" in done.stderr
    assert "once they are free, these take part as well: virtual-SM8650-1 is with ann (reserved until" in done.stderr
    view = json.loads(done.stdout)
    assert [(device["serial"], device["kind"]) for device in view["devices"]] == [("virtual-SM8650-0", "virtual")]
    assert {job["attempts"][-1]["verdict"] for job in view["jobs"]} == {"passed"}
    pair.farm("devices", "release", user="ann", code=0)
    assert "on virtual devices" in pair.farm("status").stdout
    assert set(leases(pair).values()) == {""}
    shown = pair.farm("devices", "show", "virtual-SM8650-0")
    assert re.search(r"check_passed +healthy +\d+\.\d{3} ms", shown.stdout), shown.stdout
    assert wait_for_no_process(pair.home) == {}


@pytest.mark.whole
def test_names_labels_and_service_are_obeyed(pair: Attached) -> None:
    pair.farm("devices")
    for words in (
        ("name", "virtual-SM8650-0", "desk"), ("label", "desk", "fast"),
        ("disable", "virtual-SM8650-1", "--note", "its screen is broken"),
    ):  # fmt: skip
        pair.farm("devices", *words, code=0)
    view = pair.json(*RUN, "--label", "fast")
    assert {job["attempts"][-1]["device"] for job in view["jobs"]} == {"virtual-SM8650-0"}
    for code, words, says in (
        (4, ("--device", "virtual-SM8650-1"), "out of service: its screen is broken"),
        (2, ("--label", "fats"), "unknown label 'fats': did you mean 'fast'?"),
        (2, ("--device", "dask"), "unknown device 'dask': did you mean 'desk'?"),
    ):
        assert says in pair.farm(*RUN, *words, code=code).stderr
    pair.farm("devices", "name", "virtual-SM8650-1", "desk", code=2)


def test_the_health_check_says_now_whether_a_device_is_fit(pair: Attached) -> None:
    pair.farm("lease", "virtual-SM8650-1", user="ann", code=0)
    done = pair.farm("devices", "check", code=0)
    assert done.stderr == ""
    # The lines of properties are indented.
    busy, fit = (line for line in done.stdout.splitlines() if line.startswith("virtual-"))
    assert re.fullmatch(r"virtual-SM8650-1: SM8650 virtual, not checked: with ann \(reserved until \d\d:\d\d\)", busy)
    assert re.match(r"virtual-SM8650-0: SM8650 virtual, fit\b", fit), fit
    pair.farm("devices", "check", "virtual-SM8650-1", code=4)
    inject(pair.root(0), Fault("exit_code", times=0))
    [one] = pair.json("devices", "check", "virtual-SM8650-0", code=4)["devices"]
    assert (one["name"], one["outcome"], one["latency_ms"]) == ("virtual-SM8650-0", "not fit", None)
    shown = pair.farm("devices", "show", "virtual-SM8650-0").stdout
    assert re.search(r"check_passed +healthy +\d.*\n.*check_failed +suspect", shown), shown
    assert leases(pair) == {"virtual-SM8650-0": "", "virtual-SM8650-1": "ann"}
    refused = pair.farm("devices", "remove", "virtual-SM8650-1", "--yes", code=4)
    assert "is leased or reserved by ann: run 'farm devices release " in refused.stderr


def test_a_wrong_soc_and_an_unauthorized_device_are_refused_with_the_reason(pair: Attached) -> None:
    inject(pair.root(0), Fault("wrong_soc", text="SM8750", times=0))
    inject(pair.root(1), Fault("unauthorized", times=0))
    # Until adb's server has asked again the device is offline.
    until(lambda: "unauthorized" in pair.farm("devices").stdout, "a device that refuses adb's key")
    refusal = pair.farm(*RUN, code=4).stderr
    assert "SM8750" in refusal
    assert "unauthorized" in refusal
    assert "Traceback" not in refusal


def test_two_runs_share_devices_and_never_hold_one_together(pair: Attached) -> None:
    with pair.running(*LONG, "--json", user="ann") as one, pair.running(*LONG, "--json", user="bob") as two:
        outputs = [process.communicate(timeout=240)[0] for process in (one, two)]
        assert [process.returncode for process in (one, two)] == [0, 0], outputs
    query = """
        select device.serial, attempt.started_ms from attempt join device on device.id = device_id
        order by device.serial, attempt.started_ms
    """
    begun = pair.home.rows(query)
    assert len(begun) == 6
    # A job keeps its device for LONG_MS.
    assert all(after[0] != one[0] or after[1] - one[1] >= LONG_MS for one, after in pairwise(begun)), begun
    assert set(leases(pair).values()) == {""}


@pytest.mark.whole
def test_a_killed_run_leaves_no_device_locked_and_is_resumed(pair: Attached) -> None:
    with pair.running(*LONG) as process:
        until(lambda: verdicts(pair.home), "a first job")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_for_no_process(pair.home) == {}
    finished = verdicts(pair.home)
    done = pair.farm("run", "--resume", "latest", "--json", timeout_s=240, code=0)
    jobs = json.loads(done.stdout)["jobs"]
    assert [[attempt["verdict"] for attempt in job["attempts"]] for job in jobs] == [["passed"]] * 3
    assert verdicts(pair.home)[: len(finished)] == finished
    # A result that was in the log when the run was killed goes into the store first.
    replayed = [int(number) for number in re.findall(r"recorded (\d) results? that", done.stderr)]
    [known] = map(int, re.findall(r"(\d) of 3 jobs are finished", done.stderr))
    # The kill may come after a result was stored and before it left the log.
    assert max(len(finished), sum(replayed)) <= known <= len(finished) + sum(replayed)
    assert "waiting" not in done.stderr, "it is known that the run that had the devices is dead"
    assert set(leases(pair).values()) == {""}


def test_a_job_whose_device_goes_away_is_run_by_another(pair: Attached) -> None:
    # Jobs enough that it is in the middle of one.
    with pair.running(*ALL, "--json") as process:
        until(lambda: verdicts(pair.home), "a first job")
        inject(pair.root(0), Fault("offline", seconds=3600))
        out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    assert set(verdicts(pair.home)) <= {"passed", "infra"}
    health = {row["serial"]: row["health"] for row in pair.json("devices")["devices"]}
    assert health["virtual-SM8650-0"] in ("suspect", "quarantined")
    assert health["virtual-SM8650-1"] == "healthy"


@pytest.mark.whole
def test_an_adb_server_that_is_killed_costs_at_most_one_job_a_device_each_time(home: StubHome, tmp_path: Path) -> None:
    moments = (1, 4)
    with attach(home, tmp_path, ["SM8650", "SM8650"], ordinary=True) as pair:
        with pair.running(*ALL) as process:
            for jobs in moments:
                # Not a job twice: the second time is when all that was lost has been made up for.
                until(partial(has_passed, home, jobs), "a job")
                kill_server(pair.port)
            out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out
        assert out.count(f"the adb server on port {pair.port} had ended and was started again") == len(moments), out
        assert set(last_verdicts(home)) == {"passed"}, out
        assert "quarantine" not in out
        lost = [serial for _, serial, verdict in tried(home) if verdict == "infra"]
        assert all(lost.count(device.serial) <= len(moments) for device in pair.devices), out
        assert set(leases(pair).values()) == {""}


@pytest.mark.whole
def test_a_second_ctrl_c_breaks_off_what_runs_and_leaves_the_device_as_it_was(single: Attached) -> None:
    write_stub_suite(single.home, "endless", {"case": 100_000})
    with single.running(*RUN[:-1], "./endless") as process:
        folders = single.root(0) / "data/local/tmp/farm"
        # The first folder belongs to the health check.
        until(lambda: list(folders.glob("run-*/2/input_list.txt")), "a job on the device")
        until(lambda: "check_passed" in single.farm("devices", "show", "virtual-SM8650-0").stdout, "the health check")
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        until(lambda: "finishing the running jobs" in process.stdout.readline(), "an answer to the first")
        os.killpg(process.pid, signal.SIGINT)
        assert "Traceback" not in process.stdout.read()
        assert process.wait(60) == 130
    assert list(folders.glob("run-*")) == []
    assert wait_for_no_process(single.home) == {}
    assert verdicts(single.home) == []
    assert set(leases(single).values()) == {""}


# Failures of this machine or of a single device mark no other device and no code; attached devices are shared.


CASES = 6
# The health check's file has 64 bytes, the others' have 1024.
HEALTH_CHECK_BYTES = 500


@pytest.fixture
def busy(tmp_path: Path) -> StubHome:
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
def test_a_full_disk_here_stops_the_run_and_marks_no_device(busy: StubHome, tmp_path: Path) -> None:
    (busy.cwd / "farm.toml").write_text("[health]\ndisk_wait_s = 2\n")
    with small_disk(tmp_path / "small", "24m") as small, attach(busy, tmp_path, ["SM8650", "SM8650"]) as pair:
        own = dataclasses.replace(busy, state=small / "state")
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


def test_a_device_whose_numbers_turn_wrong_after_its_health_check_fails_no_code(busy: StubHome, tmp_path: Path) -> None:
    with attach(busy, tmp_path, ["SM8650", "SM8650"]) as pair:
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
def test_a_replacement_that_dies_while_it_starts_ends_nothing(busy: StubHome, tmp_path: Path) -> None:
    site, marks = tmp_path / "site", tmp_path / "marks"
    for folder in (site, marks):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(_KILLS_FORKS)
    with busy.running(*RUN, "--virtual", "2", env={"PYTHONPATH": str(site), "MARKS": str(marks)}) as process:
        # Replacements need remaining work: workers start within milliseconds, and jobs take half a second each.
        os.kill(until(lambda: len(found := workers(busy)) == 2 and found, "two workers")[0], signal.SIGKILL)
        out = process.communicate(timeout=240)[0]
    assert process.returncode == 0, out
    assert f"{CASES} passed" in out
    assert {mark.name for mark in marks.iterdir()} == {"3", "4"}
    assert wait_for_no_process(busy) == {}


def workers(busy: FarmHome) -> list[int]:
    return [pid for pid, command in processes_of(busy).items() if PROCESS_NAME in command]


# Store deleted, replaced or overwritten during a run: the run ends at once, with a message.


VIRTUAL_RUN = ("run", "--soc", "SM8650", "--virtual", "2", "--suite", "./mine")


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
    assert home.farm(*VIRTUAL_RUN, "-k", "case0", timeout_s=600).returncode == 0
    before = len(home.rows("select id from attempt"))
    with home.running(*VIRTUAL_RUN) as process:
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
