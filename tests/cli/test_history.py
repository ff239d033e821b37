"""`farm history` of a store whose runs measured more and more."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

import msgspec
from farm_home import FarmHome
from programs import run_program

from farm.base.user import user_name
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.records import NewAlert, RunRecord
from farm.store.store import Store
from farm.suites.suite import Case, InputSpec, Job, Target

JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
LATENCY = Measurement("latency", "ns", Direction.LOWER, (2e6,))
HEAP = Measurement("dsp_heap_difference", "bytes", Direction.LOWER, (-4096.0,))
USUAL = {"executorch": "1.5.1", "qnn": "2.51"}


def record(store: Store, hour: int, facts: Mapping[str, str], *measured: Measurement) -> None:
    started_ms = 1_790_000_000_000 + hour * 3_600_000
    run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", {**facts}, started_ms))
    store.plan_jobs(run_id, [JOB])
    attempt = Attempt(
        JOB.id, Verdict.PASSED, Stage.DONE, "", device=PHONE.serial, started_ms=started_ms, measurements=measured
    )
    store.record_attempt(run_id, attempt, PHONE)


def test_what_changed_is_named_within_80_columns(home: FarmHome, store: Store) -> None:
    other = {"executorch": "1.5.1", "qnn": "2.52"}
    changes = [USUAL, {**USUAL, "profile": "basic"}, {**USUAL, "profile": "detailed"}, USUAL, other, other]
    changes += [{**other, "heap": "measured"}, {**other, "profile": "off"}]
    changes += [{**USUAL, "executorch": "1.6"}, {**USUAL, "executorch": "1.6", "native_runner": "f" * 300}]
    with store:
        for hour, facts in enumerate(changes):
            record(store, hour, facts, LATENCY)
    done = home.farm("history", "s/c", code=0)
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
    # A hash has no meaning for a reader.
    assert rows[9][1:] == ["runner", "changed"]


def test_metrics_that_80_columns_have_no_room_for_are_named_below(home: FarmHome, store: Store) -> None:
    numbers = [LATENCY, HEAP]
    for name, unit in (("htp_cycles", "cycles"), ("pte_size", "bytes"), ("decode_rate", "tokens/s")):
        numbers.append(Measurement(name, unit, Direction.LOWER, (1e9,), exact=True))
    with store:
        record(store, 0, USUAL, *numbers)
        record(store, 1, USUAL, *numbers)
    lines = home.farm("history", "s/c").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[-3:] == ["latency", "decode_rate", "htp_cycles"]
    assert "  no room for pte_size, dsp_heap_difference: --metric, or a wider terminal" in lines
    asked = home.farm("history", "s/c", "--metric", "dsp_heap_difference").stdout
    assert ("dsp_heap_difference" in asked, "no room" in asked) == (True, False)
    wide = home.farm("history", "s/c", env={"COLUMNS": "200"}).stdout
    assert ("dsp_heap_difference" in wide, "no room" in wide) == (True, False)


def test_heap_runs_show_numbers_and_debug_runs_are_no_history(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, {**USUAL, "debug": "intermediate outputs"}, LATENCY)
        only_debugged = home.farm("history", "s/c")
        record(store, 1, USUAL, HEAP)
        record(store, 2, {**USUAL, "debug": "intermediate outputs"}, LATENCY)
    assert (only_debugged.returncode, only_debugged.stdout) == (0, "")
    assert only_debugged.stderr == (
        "farm: s/c has no history yet: no attempt that counts: 'farm runs list' lists the runs\n"
    )
    done = home.farm("history", "s/c")
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[-1] == "dsp_heap_difference"
    assert lines[3].split()[-1] == "-4096"
    points = json.loads(home.farm("history", "s/c", "--json").stdout)["points"]
    assert [point["metric"] for point in points] == ["dsp_heap_difference"]


def test_a_metric_that_has_ended_names_what_is_measured_in_its_place(home: FarmHome, store: Store) -> None:
    names = ("load_time", "model_load_time")
    was, now = (Measurement(name, "ns", Direction.LOWER, (3e6,)) for name in names)
    with store:
        record(store, 0, USUAL, was)
        going_on = home.farm("history", "s/c", "--metric", "load_time")
        record(store, 1, USUAL, now)
    over = home.farm("history", "s/c", "--metric", "load_time", "--metric", "model_load_time")
    output = "farm: load_time has ended: runners measure model_load_time in its place, without verification\n"
    assert (going_on.stderr, over.stderr) == ("", output)


def test_a_metric_that_moved_has_a_line_of_blocks_and_one_that_did_not_has_none(home: FarmHome, store: Store) -> None:
    with store:
        for hour in range(40):
            record(store, hour, USUAL, msgspec.structs.replace(LATENCY, samples=(1e6 + hour * 1e4,)), HEAP)
    lines = home.farm("history", "s/c", "--limit", "40").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("  latency")
    assert lines[-1].endswith("█  1.000 to 1.390")
    assert "▁" not in "".join(line for line in lines if "dsp_heap" in line)


def test_two_runs_are_compared_the_newer_one_is_the_second(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, USUAL, HEAP)
        record(store, 1, {**USUAL, "qnn": "2.52"}, msgspec.structs.replace(HEAP, samples=(8192.0,)))
    done = home.farm("diff", "latest~1", code=0)
    lines = done.stdout.splitlines()
    assert "  qnn: 2.51 -> 2.52" in lines
    assert "    dsp_heap_difference: -4,096 bytes -> 8,192 bytes" in lines
    assert lines[lines.index(f"  {JOB.id}") - 1] == "WORSE: 1"
    (job,) = json.loads(home.farm("diff", "latest~1", "latest", "--json").stdout)["diff"]["jobs"]
    assert (job["group"], job["changes"][0]["after"]) == ("same", 8192.0)


def test_a_run_that_is_not_there_is_named(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, USUAL, HEAP)
    done = home.farm("diff", "latest~1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "latest~1" in done.stderr


def test_how_things_stand(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, USUAL, HEAP)
        assert "never had a verdict" not in home.farm("status").stdout
        run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", {**USUAL}, 1_790_000_000_000 + 3_600_000))
        store.plan_jobs(run_id, [JOB])
    done = home.farm("status", code=0)
    assert "NOT FINISHED" in done.stdout
    assert "NOT TESTED: 1" in done.stdout
    status = json.loads(home.farm("status", "latest~1", "--json").stdout)["status"]
    assert status["runs"][0]["jobs"] == {JOB.id: "passed"}


def test_a_question_in_sql_is_answered_as_table_csv_or_json(home: FarmHome, store: Store) -> None:
    counter = msgspec.structs.replace(HEAP, metric="offset", exact=True)
    with store:
        record(store, 0, USUAL, counter)
        record(store, 1, USUAL, counter)
    query = "SELECT host, count(*) AS runs, '\x1b[31m' AS red FROM run GROUP BY host"
    table = home.farm("data", "sql", query, code=0)
    assert [line.split()[:2] for line in table.stdout.splitlines()] == [["host", "runs"], ["bench", "2"]]
    assert "\x1b" not in table.stdout
    assert home.farm("data", "sql", "SELECT id FROM run ORDER BY 1", "--csv", "--limit", "1").stdout.startswith(
        "id\n2026"
    )
    answer = json.loads(home.farm("data", "sql", "-", "--json", stdin="SELECT samples FROM counter LIMIT 1").stdout)
    assert answer["rows"] == [["00f0ffffffffffff"]]


def test_sql_changes_nothing_and_errors_are_one_line(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, USUAL, HEAP)
    for query in ("DELETE FROM run", "selct", "", "SELECT nothing FROM run", "SELECT 1; SELECT 2"):
        done = home.farm("data", "sql", query, code=2)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
    assert home.farm("data", "sql", "SELECT count(*) FROM run", "--csv").stdout == "count(*)\n1\n"


def test_the_pass_rate_and_flakiness_are_shown(home: FarmHome, store: Store) -> None:
    facts = {**USUAL, "device_kind": "hardware"}
    runs = []
    with store:
        for hour in range(22):
            started_ms = 1_790_000_000_000 + hour * 3_600_000
            run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", facts, started_ms))
            store.plan_jobs(run_id, [JOB])
            verdict = Verdict.FAILED if hour in (15, 21) else Verdict.PASSED
            attempt = Attempt(
                JOB.id, verdict, Stage.DONE, "", device=PHONE.serial, started_ms=started_ms, bundle_key="b" * 64
            )
            store.record_attempt(run_id, attempt, PHONE)
            store.finish_run(run_id, 0)
            runs.append(run_id)
    first = runs[15]
    done = home.farm("history", "s/c")
    assert f"  passed 18 of 20 (69 to 98 %), newly flaky since {first}" in done.stdout.splitlines()
    assert max(map(len, done.stdout.splitlines())) <= 80
    [listed] = json.loads(home.farm("history", "s/c", "--json").stdout)["reliability"]
    assert (listed["job_id"], listed["device_kind"]) == (JOB.id, "hardware")
    assert (listed["record"]["passed"], listed["record"]["reliability"]) == (18, "newly flaky")
    status = home.farm("status").stdout
    assert f"NEWLY FLAKY: 1\n  {JOB.id}\n    passed 18 of 20 (69 to 98 %)" in status
    [answer] = json.loads(home.farm("status", "--json").stdout)["status"]["runs"]
    assert answer["newly_flaky"][JOB.id]["since"] == first
    assert answer["healed"] == {}


def test_firmware_skel_and_a_changed_case_are_events_and_known_steps_are_told(home: FarmHome, store: Store) -> None:
    runtime = {"runner": "r" * 64, "skel": "s" * 64}

    def night(hour: int, build: str, skel: str, job: Job = JOB, ms: float = 2.0) -> str:
        started_ms = 1_790_000_000_000 + hour * 3_600_000
        run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", USUAL, started_ms))
        store.plan_jobs(run_id, [job])
        phone = msgspec.structs.replace(PHONE, build=build)
        store.record_device(run_id, phone, {**runtime, "skel": skel})
        measured = (Measurement("latency", "ns", Direction.LOWER, (ms * 1e6,)),)
        attempt = Attempt(JOB.id, Verdict.PASSED, Stage.DONE, "", PHONE.serial, started_ms, measurements=measured)
        store.record_attempt(run_id, attempt)
        return run_id

    with store:
        changed = Job(msgspec.structs.replace(JOB.case, seed=7), JOB.target)
        nights = [night(0, "b1", "s1"), night(1, "b2", "s1"), night(2, "b2", "s2"), night(3, "b2", "s2", ms=3.0)]
        night(4, "b2", "s2", changed)
        [past] = store.history.pasts_of_jobs(JOB.id)
        step = NewAlert(
            series_id=past.series[0].id, device_kind="hardware", finding="regression", state="confirmed",
            last_good=nights[2], first_bad=nights[3], change=math.log(1.5), low=0.4, high=0.41, p_value=0.0, reason="",
        )  # fmt: skip
        store.alerts.record(nights[3], [step])
    done = home.farm("history", "s/c", code=0)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for event in ("device build b1 -> b2", "skel changed", "another test under the same name"):
        assert event in done.stdout
    assert f"#1 latency slower since {nights[3]}: +50.0 % (" in done.stdout
    answer = json.loads(home.farm("history", "s/c", "--json").stdout)
    assert [one["first_bad"] for one in answer["alerts"]] == [nights[3]]


def test_asking_the_store_loads_nothing_that_takes_long(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, USUAL, LATENCY)
    script = (
        "import sys\nfrom farm.cli.main import cli\n"
        "cli(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'sqlalchemy.orm', 'alembic', 'numpy', 'scipy', 'torch', 'jinja2', 'rich', 'pytest', 'litestar'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    for arguments in (["history", "s/c"], ["status"], ["alerts", "list"]):
        command = [sys.executable, "-c", script, *arguments]
        run_program(command, env=home.env)
