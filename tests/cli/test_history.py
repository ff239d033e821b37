"""`farm history` of a store whose runs measured more and more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm_home import FarmHome

JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
LATENCY = Measurement("latency", "ns", Direction.LOWER, (2e6,))
HEAP = Measurement("dsp_heap_difference", "bytes", Direction.LOWER, (-4096.0,), exact=True)
USUAL = {"executorch": "1.5.1", "qnn": "2.51"}


def record(store: Store, hour: int, facts: Mapping[str, str], *measured: Measurement) -> None:
    started_ms = 1_790_000_000_000 + hour * 3_600_000
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {**facts}, started_ms))
    store.plan_jobs(run_id, [JOB])
    attempt = Attempt(
        JOB.id, Verdict.PASSED, Stage.DONE, "", device=PHONE.serial, started_ms=started_ms, measurements=measured
    )
    store.record_attempt(run_id, attempt, PHONE)


@pytest.fixture
def store(home: FarmHome) -> Store:
    home.state.mkdir(exist_ok=True)
    return open_store(home.state / "farm.db")


def test_what_changed_is_named_within_80_columns(home: FarmHome, store: Store) -> None:
    other = {"executorch": "1.5.1", "qnn": "2.52"}
    changes = [USUAL, {**USUAL, "profile": "basic"}, {**USUAL, "profile": "detailed"}, USUAL, other, other]
    changes += [{**other, "heap": "measured"}, {**other, "profile": "off"}]
    changes += [{**USUAL, "executorch": "1.6"}, {**USUAL, "executorch": "1.6", "native_runner": "f" * 300}]
    with store:
        for hour, facts in enumerate(changes):
            record(store, hour, facts, LATENCY)
    done = home.farm("history", "s/c")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split("passed")[-1].split() for line in lines if "passed" in line]
    assert rows[0] == rows[5] == ["2.000"]
    assert [" ".join(row[1:]) for row in rows[1:5]] == [
        "profile basic",
        "profile basic -> detailed",
        "without profile detailed",
        "qnn 2.51 -> 2.52",
    ]
    assert " ".join(rows[7][1:]) == "without heap measured, profile off"
    assert rows[8][1:] == ["new", "toolchain"]
    assert rows[9][1] == "native_runner"
    assert rows[9][2].endswith("fff…")


def test_heap_runs_show_numbers_and_debug_runs_are_no_history(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, {**USUAL, "debug": "intermediate outputs"}, LATENCY)
        only_debugged = home.farm("history", "s/c")
        record(store, 1, USUAL, HEAP)
        record(store, 2, {**USUAL, "debug": "intermediate outputs"}, LATENCY)
    assert (only_debugged.returncode, only_debugged.stdout) == (0, "")
    assert only_debugged.stderr == "farm: s/c has no history yet: no attempt, or of 'farm debug' alone\n"
    done = home.farm("history", "s/c")
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[-1] == "dsp_heap_difference"
    assert lines[3].split()[-1] == "-4096"
    points = json.loads(home.farm("history", "s/c", "--json").stdout)["points"]
    assert [point["metric"] for point in points] == ["dsp_heap_difference"]
