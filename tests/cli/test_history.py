"""`farm history`, `farm diff`, `farm status` and `farm data sql` of a store with made-up runs."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from farm_home import FarmHome
from made_runs import BEGAN_MS, FACTS, HOUR_MS, JOB, PHONE, made_job, measured, record_run

from farm.results.attempt import Measurement, Verdict
from farm.store.records import NewAlert
from farm.store.store import Store
from farm.suites.suite import Job

LATENCY = measured("latency", 2e6)
HEAP = measured("dsp_heap_difference", -4096.0, "bytes")


def record(store: Store, hour: int, *measurements: Measurement, **facts: str) -> str:
    fields: dict[str, Any] = {"attempt": {"measurements": measurements}, "fingerprint": {**FACTS, **facts}}
    return record_run(store, started_ms=BEGAN_MS + hour * HOUR_MS, **fields)


def lines_of(home: FarmHome, *arguments: str) -> list[str]:
    """Return the lines of a command, none of them longer than 80 columns."""
    lines = home.farm(*arguments, code=0).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_changes_between_runs_are_named_within_80_columns(home: FarmHome, store: Store) -> None:
    changes: list[dict[str, str]] = [{}, {"profile": "basic"}, {"profile": "detailed"}, {}, {"qnn": "2.52"}]
    changes += [{"qnn": "2.52", "heap": "measured"}, {"qnn": "2.52", "profile": "off"}]
    changes += [{"executorch": "1.6"}, {"executorch": "1.6", "native_runner": "f" * 300}]
    with store:
        for hour, facts in enumerate(changes):
            record(store, hour, LATENCY, **facts)
    rows = [
        line.split("passed")[-1].split(maxsplit=1)[1:] for line in lines_of(home, "history", "s/c") if "passed" in line
    ]
    assert [" ".join("".join(row).split()) for row in rows] == [
        "", "profile basic", "profile basic -> detailed", "without profile detailed", "qnn 2.51 -> 2.52",
        "heap measured", "without heap measured, profile off", "new toolchain",
        # A hash has no meaning for a reader.
        "runner changed",
    ]  # fmt: skip


def test_metrics_without_room_in_80_columns_are_named_below(home: FarmHome, store: Store) -> None:
    numbers = [LATENCY, HEAP]
    for name, unit in (("htp_cycles", "cycles"), ("pte_size", "bytes"), ("decode_rate", "tokens/s")):
        numbers.append(measured(name, 1e9, unit, exact=True))
    with store:
        record(store, 0, *numbers)
    lines = lines_of(home, "history", "s/c")
    assert lines[1].split()[-3:] == ["latency", "decode_rate", "htp_cycles"]
    assert "  no room for pte_size, dsp_heap_difference: --metric, or a wider terminal" in lines
    asked = home.farm("history", "s/c", "--metric", "dsp_heap_difference").stdout
    wide = home.farm("history", "s/c", env={"COLUMNS": "200"}).stdout
    for shown in (asked, wide):
        assert ("dsp_heap_difference" in shown, "no room" in shown) == (True, False)


def test_heap_runs_show_numbers_and_debug_runs_are_no_history(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, LATENCY, debug="intermediate outputs")
        only_debugged = home.farm("history", "s/c", code=0)
        record(store, 1, HEAP)
    assert (only_debugged.stdout, "s/c has no history yet" in only_debugged.stderr) == ("", True)
    lines = lines_of(home, "history", "s/c")
    assert [line.split()[-1] for line in (lines[1], lines[3])] == ["dsp_heap_difference", "-4096"]


def test_a_metric_that_has_ended_names_its_successor(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, measured("load_time", 3e6))
        going_on = home.farm("history", "s/c", "--metric", "load_time")
        record(store, 1, measured("model_load_time", 3e6))
    over = home.farm("history", "s/c", "--metric", "load_time", "--metric", "model_load_time")
    assert going_on.stderr == ""
    assert "load_time has ended: runners measure model_load_time in its place" in over.stderr


def test_a_metric_that_moved_has_a_line_of_blocks_and_a_constant_one_has_none(home: FarmHome, store: Store) -> None:
    with store:
        for hour in range(40):
            record(store, hour, measured("latency", 1e6 + hour * 1e4), HEAP)
    lines = lines_of(home, "history", "s/c", "--limit", "40")
    assert lines[-1].startswith("  latency")
    assert lines[-1].endswith("█  1.000 to 1.390")
    assert "▁" not in "".join(line for line in lines if "dsp_heap" in line)


def test_two_runs_are_compared_the_newer_one_is_the_second(home: FarmHome, store: Store) -> None:
    with store:
        record(store, 0, HEAP)
        record(store, 1, msgspec.structs.replace(HEAP, samples=(8192.0,)), qnn="2.52")
    lines = lines_of(home, "diff", "latest~1")
    assert "  qnn: 2.51 -> 2.52" in lines
    assert "    dsp_heap_difference: -4,096 bytes -> 8,192 bytes" in lines
    assert lines[lines.index(f"  {JOB.id}") - 1] == "WORSE: 1"


def test_a_question_in_sql_is_answered_and_changes_nothing(home: FarmHome, store: Store) -> None:
    with store:
        for hour in range(2):
            record(store, hour, measured("offset", -4096.0, "bytes", exact=True))
    table = lines_of(home, "data", "sql", "SELECT host, count(*) AS runs FROM run GROUP BY host")
    assert [line.split() for line in table] == [["host", "runs"], ["bench", "2"]]
    csv = home.farm("data", "sql", "SELECT id FROM run ORDER BY 1", "--csv", "--limit", "1").stdout
    assert csv.startswith("id\n2026")
    answer = home.json("data", "sql", "-", stdin="SELECT samples FROM counter LIMIT 1")
    assert answer["rows"] == [["00f0ffffffffffff"]]
    for query in ("DELETE FROM run", "selct", "", "SELECT nothing FROM run", "SELECT 1; SELECT 2"):
        done = home.farm("data", "sql", query, code=2)
        assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert home.farm("data", "sql", "SELECT count(*) FROM run", "--csv").stdout == "count(*)\n2\n"


def test_the_pass_rate_and_flakiness_are_shown(home: FarmHome, store: Store) -> None:
    with store:
        runs = [
            record_run(
                store,
                verdicts=[Verdict.FAILED if hour in (15, 21) else Verdict.PASSED],
                started_ms=BEGAN_MS + hour * HOUR_MS,
                attempt={"bundle_key": "b" * 64},
                fingerprint={**FACTS, "device_kind": "hardware"},
            )
            for hour in range(22)
        ]
    assert f"  passed 18 of 20 (69 to 98 %), newly flaky since {runs[15]}" in lines_of(home, "history", "s/c")


def test_firmware_skel_and_a_changed_case_are_events_and_known_steps_are_told(home: FarmHome, store: Store) -> None:
    def night(hour: int, build: str, skel: str, job: Job = JOB, ms: float = 2.0) -> str:
        started_ms, phone = BEGAN_MS + hour * HOUR_MS, msgspec.structs.replace(PHONE, build=build)
        latency = {"measurements": (measured("latency", ms * 1e6),)}
        runtime = {"runner": "r" * 64, "skel": skel}
        return record_run(store, [job], started_ms=started_ms, attempt=latency, device=phone, runtime=runtime)

    with store:
        nights = [night(0, "b1", "s1"), night(1, "b2", "s1"), night(2, "b2", "s2"), night(3, "b2", "s2", ms=3.0)]
        night(4, "b2", "s2", Job(msgspec.structs.replace(made_job().case, seed=7), JOB.target))
        [past] = store.history.pasts_of_jobs(JOB.id)
        step = NewAlert(
            series_id=past.series[0].id, device_kind="hardware", finding="regression", state="confirmed",
            last_good=nights[2], first_bad=nights[3], change=math.log(1.5), low=0.4, high=0.41, p_value=0.0, reason="",
        )  # fmt: skip
        store.alerts.record(nights[3], [step])
    shown = "\n".join(lines_of(home, "history", "s/c"))
    for event in ("device build b1 -> b2", "skel changed", "another test under the same name"):
        assert event in shown
    assert f"#1 latency slower since {nights[3]}: +50.0 % (" in shown
