"""`farm alerts list` and `farm perf baseline`, as used on the morning after a slow nightly run."""

from __future__ import annotations

import time
from typing import Any

import pytest
from farm_home import FarmHome
from made_runs import made_job, measured, record_run

from farm.dispatch.history_comparison import record_comparison
from farm.results.attempt import Verdict
from farm.store.store import Store, open_store

DAY_MS = 86_400_000
JOB, OTHER = made_job("conv"), made_job("relu")


def night(store: Store, days_ago: int, ms: float, size: int, verdict: Verdict = Verdict.PASSED) -> str:
    numbers = (measured("latency", ms * 1e6), measured("pte_size", float(size), "bytes", exact=True))
    run_id = record_run(
        store, (JOB, OTHER), (Verdict.PASSED, verdict),
        started_ms=time.time_ns() // 1_000_000 - days_ago * DAY_MS,
        attempt={"seconds": 0.2, "bundle_key": "b" * 64, "measurements": numbers},
        priority="nightly", fingerprint={"executorch": "1.5.1", "device_kind": "hardware"},
    )  # fmt: skip
    record_comparison(store, run_id)
    return run_id


@pytest.fixture
def slow(home: FarmHome) -> str:
    """Ten nights; in the last one both jobs are slower and greater, and one fails."""
    home.state.mkdir(exist_ok=True)
    with open_store(home.state / "farm.db") as store:
        for day in range(10, 1, -1):
            night(store, day, 2.0 + 0.01 * (day % 3), 1000)
        return night(store, 1, 2.4, 1016, Verdict.FAILED)


def answer(home: FarmHome, *arguments: str) -> dict[str, Any]:
    return home.json(*arguments)  # type: ignore[no-any-return]


def test_the_list_is_what_needs_somebody_within_80_columns(home: FarmHome, slow: str) -> None:
    done = home.farm("alerts", "list", code=0)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "REGRESSIONS: 2"
    assert "      pte_size worse: 1000 -> 1016 bytes" in lines
    assert f"RED in {slow}: 1" in lines
    # The regression is not confirmed yet, so no person is asked to handle it.
    assert "latency" not in done.stdout


def test_who_sees_to_it_is_said_where_it_is_listed_and_a_verdict_stays(home: FarmHome, slow: str) -> None:
    first, second = (one["id"] for one in answer(home, "alerts", "list")["alerts"])
    done = home.farm("alerts", "assign", str(first), "--owner", "grace", "--note", "see #345", code=0)
    assert "acknowledged by " in done.stdout
    assert home.farm("alerts", "assign", OTHER.id, "--owner", "ada", "--until", "2099-12-31").returncode == 0
    listed = home.farm("alerts", "list").stdout
    assert "acknowledged: grace: see #345" in listed
    assert "until 2099-12-31" in listed
    status = answer(home, "status")["status"]
    assert status["runs"][0]["jobs"][OTHER.id] == "new_failure"
    assert home.farm("alerts", "assign", f"#{first}", "--state", "fixed").returncode == 0
    assert [one["id"] for one in answer(home, "alerts", "list")["alerts"]] == [second]
    # A note alone opens nothing again.
    assert home.farm("alerts", "assign", str(first), "--note", "in 1.6").returncode == 0
    output = answer(home, "alerts", "assign", str(first))["remarks"]
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
    before = answer(home, "perf", "baseline", "s/conv", "--metric", "latency")["levels"]
    assert before[0]["runs"] == 10
    accepted = answer(home, "alerts", "accept", "s/*", "--note", "a safer kernel")["accepted"]
    assert sorted((one["job_id"], one["metric"]) for one in accepted) == sorted(
        (job.id, metric) for job in (JOB, OTHER) for metric in ("latency", "pte_size")
    )
    assert answer(home, "alerts", "list")["alerts"] == []
    after = answer(home, "perf", "baseline", "s/conv", "--metric", "latency")["levels"]
    assert (after[0]["runs"], after[0]["median"], after[0]["since"]) == (1, 2.4e6, slow)
    with open_store(home.state / "farm.db") as store:
        assert store.alerts.of_run(night(store, 0, 2.41, 1016)) == []
    shown = home.farm("perf", "baseline", "s/conv").stdout
    assert (max(map(len, shown.splitlines())) <= 80, f"since {slow}" in shown) == (True, True)


def test_a_note_cannot_write_to_the_terminal_nor_begin_a_line(home: FarmHome, slow: str) -> None:
    first = answer(home, "alerts", "list")["alerts"][0]["id"]
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
