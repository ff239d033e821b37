"""Devices that several users, or several runs, share, on real parts: virtual devices are attached as phones are."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from attached import Attached, attach
from farm_home import FarmHome, wait_for_no_process
from ordinary_server import kill_server
from stub_home import StubHome, make_stub_home, next_stub_home, write_stub_suite
from waiting import until

from farm.devices.virtual.faults import Fault, inject

RUN = ("run", "--soc", "SM8650", "--suite", "./mine")
LONG = ("run", "--soc", "SM8650", "--suite", "./long", "-k", "case0 or case1 or case2")
ALL = ("run", "--soc", "SM8650", "--suite", "./long")
ALL_JOBS = 6
# A job takes longer than a command takes to start, and all of them far longer, also while this machine does other work.
LONG_MS = 1000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> StubHome:
    """Home with the bundles, so that what follows is about devices."""
    home = make_stub_home(tmp_path_factory.mktemp("compiled") / "stub")
    write_suites(home)
    for words in ((*ALL, "--compile-only"), (*RUN, "--virtual", "1")):
        home.farm(*words, code=0)
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


def verdicts(home: FarmHome) -> list[str]:
    try:
        with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
            return [row[0] for row in connection.execute("select verdict from attempt order by id")]
    except sqlite3.Error:
        return []


def attempts_of(home: FarmHome, user: str) -> list[tuple[str, int]]:
    """Return the verdict of each attempt in a user's runs, and when it began; epoch, milliseconds."""
    query = """
        select verdict, attempt.started_ms from attempt join run_job on run_job.id = run_job_id
        join run on run.id = run_id where user_name = ? order by attempt.id
    """
    with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
        return connection.execute(query, [user]).fetchall()


def has_waiter(home: FarmHome) -> bool:
    with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
        return bool(connection.execute("select count(*) from waiter").fetchone()[0])


def leases(attached: Attached) -> dict[str, str]:
    return {row["serial"]: row["holder"] for row in attached.json("devices")["devices"]}


def test_attached_virtual_devices_run_jobs_and_are_given_back(pair: Attached) -> None:
    assert pair.farm("lease", "virtual-SM8650-1", user="ann").returncode == 0
    assert pair.farm("devices", "name", "virtual-SM8650-0", "desk").returncode == 0
    done = pair.farm(*RUN, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 device: desk\n" in done.stderr
    assert "once they are free, these take part as well: virtual-SM8650-1 is with ann (reserved until" in done.stderr
    view = json.loads(done.stdout)
    assert [device["serial"] for device in view["devices"]] == ["virtual-SM8650-0"]
    assert pair.farm("devices", "release", user="ann").returncode == 0
    assert {job["attempts"][-1]["verdict"] for job in view["jobs"]} == {"passed"}
    assert {device["kind"] for device in view["devices"]} == {"virtual"}
    assert view["fingerprint"]["device_kind"] == "virtual"
    assert "on virtual devices" in pair.farm("status").stdout
    assert set(leases(pair).values()) == {""}
    shown = pair.farm("devices", "show", "virtual-SM8650-0")
    assert re.search(r"check_passed +healthy +\d+\.\d{3} ms", shown.stdout), shown.stdout
    assert wait_for_no_process(pair.home) == {}


def test_devices_tells_everything_of_each(pair: Attached) -> None:
    rows = pair.json("devices")["devices"]
    assert [row["serial"] for row in rows] == ["virtual-SM8650-0", "virtual-SM8650-1"]
    for row in rows:
        assert (row["soc"], row["kind"], row["state"], row["health"]) == ("SM8650", "virtual", "ready", "healthy")
        assert {"htp", "xnnpack"} <= set(row["backends"])
        assert "gpu" not in row["backends"], "there is no simulator of it"
        assert row["root"] is False
        assert 0 < row["battery_percent"] <= 100
        assert 0 < row["temperature_c"] < 60
        assert row["free_bytes"] > 0
        assert row["last_seen_ms"] > 0
    text = pair.farm("devices").stdout
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert "battery" in text
    assert "now" in text


@pytest.mark.whole
def test_names_labels_and_service_are_remembered_and_obeyed(pair: Attached) -> None:
    pair.farm("devices")
    assert pair.farm("devices", "name", "virtual-SM8650-0", "desk").returncode == 0
    assert pair.farm("devices", "label", "desk", "fast").returncode == 0
    assert pair.farm("devices", "disable", "virtual-SM8650-1", "--note", "its screen is broken").returncode == 0
    [desk, other] = pair.json("devices")["devices"]
    assert (desk["name"], desk["labels"]) == ("desk", ["fast"])
    assert (other["state"], other["reason"]) == ("out", "its screen is broken")
    done = pair.farm(*RUN, "--json")
    assert {job["attempts"][-1]["device"] for job in json.loads(done.stdout)["jobs"]} == {"virtual-SM8650-0"}
    refused = pair.farm(*RUN, "--device", "virtual-SM8650-1")
    assert refused.returncode == 4
    assert "out of service: its screen is broken" in refused.stderr
    unknown = pair.farm(*RUN, "--label", "fats")
    assert (unknown.returncode, "unknown label 'fats': did you mean 'fast'?" in unknown.stderr) == (2, True)
    unknown = pair.farm(*RUN, "--device", "dask")
    assert (unknown.returncode, "unknown device 'dask': did you mean 'desk'?" in unknown.stderr) == (2, True)
    assert pair.farm("devices", "name", "virtual-SM8650-1", "desk").returncode == 2
    assert "did you mean" in pair.farm("devices", "show", "virtual-SM8650-O").stderr


def test_the_health_check_says_now_whether_a_device_is_fit(pair: Attached) -> None:
    assert pair.farm("lease", "virtual-SM8650-1", user="ann").returncode == 0
    done = pair.farm("devices", "check")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    # The lines of properties are indented.
    busy, fit = (line for line in done.stdout.splitlines() if line.startswith("virtual-"))
    assert re.fullmatch(r"virtual-SM8650-1: SM8650 virtual, not checked: with ann \(reserved until \d\d:\d\d\)", busy)
    assert re.match(r"virtual-SM8650-0: SM8650 virtual, fit\b", fit), fit
    assert pair.farm("devices", "check", "virtual-SM8650-1").returncode == 4
    inject(pair.root(0), Fault("exit_code", times=0))
    failed = pair.farm("devices", "check", "virtual-SM8650-0", "--json")
    assert failed.returncode == 4
    [one] = json.loads(failed.stdout)["devices"]
    assert (one["name"], one["outcome"], one["latency_ms"]) == ("virtual-SM8650-0", "not fit", None)
    shown = pair.farm("devices", "show", "virtual-SM8650-0").stdout
    assert re.search(r"check_passed +healthy +\d.*\n.*check_failed +suspect", shown), shown
    assert leases(pair) == {"virtual-SM8650-0": "", "virtual-SM8650-1": "ann"}
    refused = pair.farm("devices", "remove", "virtual-SM8650-1", "--yes")
    assert refused.returncode == 4, refused.stderr
    assert "is leased or reserved by ann: run 'farm devices release " in refused.stderr


def test_a_wrong_soc_and_an_unauthorized_device_are_refused_with_the_reason(pair: Attached) -> None:
    inject(pair.root(0), Fault("wrong_soc", text="SM8750", times=0))
    inject(pair.root(1), Fault("unauthorized", times=0))
    # Until adb's server has asked again the device is offline.
    until(lambda: "unauthorized" in pair.farm("devices").stdout, "a device that refuses adb's key")
    done = pair.farm(*RUN)
    assert done.returncode == 4
    assert "SM8750" in done.stderr
    assert "unauthorized" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_share_devices_and_never_hold_one_together(pair: Attached) -> None:
    with pair.running(*LONG, "--json", user="ann") as one, pair.running(*LONG, "--json", user="bob") as two:
        outputs = [process.communicate(timeout=240)[0] for process in (one, two)]
        assert [process.returncode for process in (one, two)] == [0, 0], outputs
    query = """
        select device.serial, attempt.started_ms from attempt join device on device.id = device_id
        order by device.serial, attempt.started_ms
    """
    with sqlite3.connect(pair.home.state / "farm.db") as connection:
        begun = connection.execute(query).fetchall()
    assert len(begun) == 6
    # A job keeps its device for LONG_MS.
    assert all(after[0] != one[0] or after[1] - one[1] >= LONG_MS for one, after in pairwise(begun)), begun
    assert set(leases(pair).values()) == {""}


@pytest.mark.whole
def test_a_person_gets_a_device_from_a_nightly_run_which_goes_on_with_it_later(single: Attached) -> None:
    with single.running(*ALL, "--nightly", user="night") as nightly:
        until(lambda: verdicts(single.home), "a first job of the nightly run")
        with single.running("lease", "SM8650", "--for", "10m", user="ann") as lease:
            until(lambda: has_waiter(single.home) or lease.poll() is not None, "ann's request")
            before = len(verdicts(single.home))
            assert lease.wait(timeout=120) == 0
        during = len(verdicts(single.home))
        assert during - before <= 2
        assert leases(single) == {"virtual-SM8650-0": "ann"}
        begin_ms = time.time_ns() // 1_000_000
        hers = single.farm(*RUN, user="ann")
        assert hers.returncode == 0, hers.stderr
        end_ms = time.time_ns() // 1_000_000
        assert single.farm("devices", "release", user="ann").returncode == 0
        output = nightly.communicate(timeout=240)[0]
        assert nightly.returncode == 0, output
    assert "is given to another user, who waits for it" in output
    done = attempts_of(single.home, "night")
    assert [verdict for verdict, _ in done] == ["passed"] * ALL_JOBS
    assert [started_ms for _, started_ms in done if begin_ms <= started_ms <= end_ms] == []


@pytest.mark.whole
def test_whoever_has_reserved_a_device_may_use_it_and_others_wait(single: Attached) -> None:
    assert single.farm("lease", "virtual-SM8650-0", user="ann").returncode == 0
    with single.running(*RUN, user="bob") as waiting:
        assert waiting.stdout is not None
        line = "-"
        while line and "waiting for a SM8650: " not in line:
            line = waiting.stdout.readline()
        assert "virtual-SM8650-0 is with ann" in line, line
        assert single.farm(*RUN, user="ann").returncode == 0
        assert waiting.poll() is None
        assert single.farm("devices", "release", user="ann").returncode == 0
        output = waiting.communicate(timeout=120)[0]
        assert waiting.returncode == 0, output


@pytest.mark.whole
def test_a_killed_run_leaves_no_device_locked_and_is_resumed(pair: Attached) -> None:
    with pair.running(*LONG) as process:
        until(lambda: verdicts(pair.home), "a first job")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert wait_for_no_process(pair.home) == {}
    finished = verdicts(pair.home)
    done = pair.farm("run", "--resume", "latest", "--json", timeout_s=240)
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert [job["attempts"][-1]["verdict"] for job in view["jobs"]] == ["passed"] * 3
    assert sum(len(job["attempts"]) for job in view["jobs"]) == 3
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


def lost_jobs(home: FarmHome) -> set[str]:
    """Return the jobs of which the last attempt is infra."""
    with sqlite3.connect(f"file:{home.state / 'farm.db'}?mode=ro", uri=True) as connection:
        last = dict(connection.execute("select run_job_id, verdict from attempt order by id").fetchall())
    return {job for job, verdict in last.items() if verdict == "infra"}


@pytest.mark.whole
def test_an_adb_server_that_is_killed_costs_at_most_one_job_a_device_each_time(home: StubHome, tmp_path: Path) -> None:
    moments = (1, 6)
    with attach(home, tmp_path, ["SM8650", "SM8650"], ordinary=True) as pair:
        with pair.running(*ALL, "--suite", "./mine") as process:
            for jobs in moments:
                # Not a job twice: the second time is when all that was lost has been made up for.
                until(lambda: verdicts(home).count("passed") >= jobs and not lost_jobs(home), "a job")  # noqa: B023
                kill_server(pair.port)
            out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out
        assert out.count(f"the adb server on port {pair.port} had ended and was started again") == len(moments), out
        with sqlite3.connect(home.state / "farm.db") as store:
            query = "select run_job_id, serial, verdict from attempt join device on device.id = device_id"
            tried = store.execute(f"{query} order by attempt.id").fetchall()
        # The last word about each job.
        assert set({job: verdict for job, _, verdict in tried}.values()) == {"passed"}, out
        assert "quarantine" not in out
        lost = [serial for _, serial, verdict in tried if verdict == "infra"]
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


def test_an_overheated_device_waits_and_then_says_so(single: Attached) -> None:
    config = single.home.cwd / "farm.toml"
    config.write_text("[health]\ngate_wait_s = 1.0\n")
    inject(single.root(0), Fault("overheated", times=0))
    view = json.loads(single.farm(*RUN, "--json").stdout)
    notes = [note for job in view["jobs"] for note in job["attempts"][-1]["notes"]]
    assert any("limit" in note for note in notes), notes
