"""`farm history`, `farm diff`, `farm status`, `farm alerts` and `farm perf baseline` of a store with made-up runs."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from made_runs import BEGAN_MS, FACTS, HOUR_MS, JOB, PHONE, made_job, measured, record_run

from farm.dispatch.history_comparison import record_comparison
from farm.results.attempt import Measurement, Verdict
from farm.serve.pages.history import HistoryQuery, history_page
from farm.serve.pages.runs import RunsQuery, runs_page
from farm.serve.pages.status import StatusQuery, status_page
from farm.serve.render import Address, html_of
from farm.store.records import NewAlert, RunToolchain
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.suites.suite import Job

# `farm history`, `farm diff` and `farm status` of a store with made-up runs.


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


# `farm alerts list` and `farm perf baseline`, as used on the morning after a slow nightly run.


DAY_MS = 86_400_000
JOB_OF_NIGHTS, OTHER = made_job("conv"), made_job("relu")


def night(store: Store, days_ago: int, ms: float, size: int, verdict: Verdict = Verdict.PASSED) -> str:
    numbers = (measured("latency", ms * 1e6), measured("pte_size", float(size), "bytes", exact=True))
    run_id = record_run(
        store, (JOB_OF_NIGHTS, OTHER), (Verdict.PASSED, verdict),
        started_ms=time.time_ns() // 1_000_000 - days_ago * DAY_MS,
        attempt={"seconds": 0.2, "bundle_key": "b" * 64, "measurements": numbers},
        priority="nightly", fingerprint={"executorch": "1.5.1", "device_kind": "hardware"},
    )  # fmt: skip
    record_comparison(store, run_id)
    return run_id


@pytest.fixture
def slow(store: Store) -> str:
    """Ten nights; in the last one both jobs are slower and greater, and one fails."""
    with store:
        for day in range(10, 1, -1):
            night(store, day, 2.0 + 0.01 * (day % 3), 1000)
        return night(store, 1, 2.4, 1016, Verdict.FAILED)


def test_the_list_is_what_needs_somebody_within_80_columns(home: FarmHome, slow: str) -> None:
    lines = lines_of(home, "alerts", "list")
    assert lines[0] == "REGRESSIONS: 2"
    assert "      pte_size worse: 1000 -> 1016 bytes" in lines
    assert f"RED in {slow}: 1" in lines
    # The regression is not confirmed yet, so no person is asked to handle it.
    assert "latency" not in "\n".join(lines)


def test_who_sees_to_it_is_said_where_it_is_listed_and_a_verdict_stays(home: FarmHome, slow: str) -> None:
    first, second = (one["id"] for one in home.json("alerts", "list")["alerts"])
    done = home.farm("alerts", "assign", str(first), "--owner", "grace", "--note", "see #345", code=0)
    assert "acknowledged by " in done.stdout
    assert home.farm("alerts", "assign", OTHER.id, "--owner", "ada", "--until", "2099-12-31").returncode == 0
    listed = home.farm("alerts", "list").stdout
    assert "acknowledged: grace: see #345" in listed
    assert "until 2099-12-31" in listed
    status = home.json("status")["status"]
    assert status["runs"][0]["jobs"][OTHER.id] == "new_failure"
    assert home.farm("alerts", "assign", f"#{first}", "--state", "fixed").returncode == 0
    assert [one["id"] for one in home.json("alerts", "list")["alerts"]] == [second]
    # A note alone opens nothing again.
    assert home.farm("alerts", "assign", str(first), "--note", "in 1.6").returncode == 0
    output = home.json("alerts", "assign", str(first))["remarks"]
    assert [one["state"] for one in output] == ["acknowledged", "fixed", "fixed"]
    assert slow in home.farm("status").stdout


@pytest.mark.usefixtures("slow")
def test_bad_input_is_refused(home: FarmHome) -> None:
    for arguments, message in {
        ("alerts", "assign", "4711"): "4711",
        ("alerts", "assign", "9" * 5000): "unknown alert '999",
        ("alerts", "assign", "s/conv2"): "did you mean",
        ("alerts", "assign", "s/*", "--owner", "ada"): "means 2 jobs",
        ("alerts", "assign", "--owner", "ada"): "ALERT|JOB is missing",
        ("alerts", "assign", "s/conv", "--state", "accepted"): "red until it passes",
        ("alerts", "assign", "s/conv", "--until", "2001-01-01"): "is over",
        ("alerts", "accept", "s/conv", "--note", " "): "--note is empty",
        ("alerts", "accept", "s/conv"): "--note",
        ("alerts", "accept", "s/conv", "--note", "x", "--run", "2001"): "2001",
        ("alerts", "accept", "s/conv", "--note", "x", "--metric", "speed"): "has no judged number speed",
        ("perf", "baseline", "nothing"): "nothing",
        ("perf", "baseline", "s/conv", "--metric", "speed"): "has no judged number speed",
    }.items():
        assert message in home.farm(*arguments, code=2).stderr


def test_an_accepted_level_is_what_the_next_nights_are_compared_with(home: FarmHome, slow: str) -> None:
    before = home.json("perf", "baseline", "s/conv", "--metric", "latency")["levels"]
    assert before[0]["runs"] == 10
    accepted = home.json("alerts", "accept", "s/*", "--note", "a safer kernel")["accepted"]
    assert sorted((one["job_id"], one["metric"]) for one in accepted) == sorted(
        (job.id, metric) for job in (JOB_OF_NIGHTS, OTHER) for metric in ("latency", "pte_size")
    )
    assert home.json("alerts", "list")["alerts"] == []
    after = home.json("perf", "baseline", "s/conv", "--metric", "latency")["levels"]
    assert (after[0]["runs"], after[0]["median"], after[0]["since"]) == (1, 2.4e6, slow)
    with open_store(home.state / "farm.db") as store:
        assert store.alerts.of_run(night(store, 0, 2.41, 1016)) == []
    assert f"since {slow}" in "\n".join(lines_of(home, "perf", "baseline", "s/conv"))


def test_a_note_cannot_write_to_the_terminal_nor_begin_a_line(home: FarmHome, slow: str) -> None:
    first = home.json("alerts", "list")["alerts"][0]["id"]
    note = "\x1b]0;mine\x07\n::error::not from farm " + "long " * 40
    for arguments in (
        ("alerts", "assign", str(first), "--note", note),
        ("alerts", "list"),
        ("perf", "confirm", "--run", slow),
        ("history", "s"),
    ):
        done = home.farm(*arguments)
        lines = done.stdout.splitlines()
        assert "Traceback" not in done.stderr
        assert max(map(len, lines)) <= 80
        assert not any(line.startswith("::") for line in lines)
        assert not set("\x1b\x07") & set(done.stdout)


# Answers of commands and pages for a store with two branches and a private run.


URL = "https://git.example/executorch/commit/{commit}"
OLD, NEW = "a" * 40, "b" * 40


def record_with(store: Store, hours_ago: int, toolchain: RunToolchain, verdict: Verdict = Verdict.PASSED) -> str:
    return record_run(
        store, verdicts=[verdict], started_ms=now_ms() - hours_ago * HOUR_MS, toolchain=toolchain,
        attempt={"measurements": (measured("latency", 2e6),)},
        fingerprint={"executorch": "1.6.0", "qnn": "2.51", "device_kind": "hardware", "commit": toolchain.commit},
    )  # fmt: skip


def test_lines_are_asked_for_by_name_and_private_runs_by_their_id(home: FarmHome, store: Store) -> None:
    with store:
        before = record_with(store, 9, RunToolchain("main", "main", commit=OLD, commit_url=URL))
        default = record_with(store, 8, RunToolchain())
        main = record_with(store, 7, RunToolchain("main", "main", commit=NEW, before=OLD, commit_url=URL))
        mine = record_with(
            store, 1, RunToolchain("main", "main", private=True, commit=NEW, dirty=True), verdict=Verdict.FAILED
        )
        pages = {
            "status": status_page(store, StatusQuery(branch="main")),
            "history": history_page(store, HistoryQuery(job="s/c", branch="main")),
            "runs": runs_page(store, RunsQuery()),
        }
        shown = {name: html_of(facts, None, Address("/", {}), may=lambda _: False) for name, facts in pages.items()}
        assert runs_page(store, RunsQuery(branch="main")).total == 2
    assert f'href="https://git.example/executorch/commit/{NEW}"' in shown["history"]
    assert '<span class="tag">local run</span>' in shown["history"]
    assert main in shown["status"]
    assert mine in shown["runs"]
    assert "<td>local</td>" in shown["runs"]

    done = home.farm("history", "s/c", "--branch", "main", code=0)
    assert "farm: branch main" in done.stderr
    assert "commits aaaaaaaaaa..bbbbbbbbbb" in done.stdout
    assert f"https://git.example/executorch/compare/{OLD}...{NEW}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "https" not in line) <= 80
    points = home.json("history", "s/c", "--branch", "main")["points"]
    assert {(point["run_id"], point["commit"]) for point in points} == {(before, OLD), (main, NEW), (mine, NEW)}
    assert {point["run_id"] for point in home.json("history", "s/c")["points"]} == {default}

    head, run, *_ = home.farm("status", "--branch", "main").stdout.splitlines()
    assert (head, run.startswith(main)) == ("branch main", True)
    assert home.json("status")["status"]["runs"][0]["run"]["run_id"] == default
    own = home.farm("status", mine).stdout
    assert "compared with branch main and not part of its history" in own
    assert "main" in home.farm("alerts", "list", "--branch", "mian", code=2).stderr
    assert [home.json("report", *words)["id"] for words in (["latest@main"], [])] == [main, mine]
