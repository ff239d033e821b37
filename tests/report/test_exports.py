"""CTRF, JUnit and records for a dashboard: valid in their formats, with true facts about every job."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest
from export_schemas import CTRF, HUD, JUNIT

from farm.report.formats.ctrf import render_ctrf
from farm.report.formats.hud import render_hud
from farm.report.formats.junit import render_junit
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.view import DeviceView, RunView, SkipReason


def ctrf(view: RunView) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(render_ctrf(view))
    CTRF.validate(document)
    return document


def hud(view: RunView) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(render_hud(view), parse_constant=pytest.fail)
    HUD.validate(records)
    return records


def junit(view: RunView) -> ET.Element:
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    assert root.tag == "testsuites"
    for parent in root.iter():
        needed, allowed, children = JUNIT[parent.tag]
        assert needed <= set(parent.keys()) <= needed | allowed, parent.tag
        assert {child.tag for child in parent} <= children, parent.tag
        places = [place for place, child in enumerate(parent) if child.tag == "properties"]
        assert places in ([], [0])
        for count in needed & {"tests", "failures", "errors"}:
            assert re.fullmatch(r"\d+", parent.get(count, ""))
        if "time" in parent.keys():  # noqa: SIM118 - an element is no dictionary
            assert re.fullmatch(r"\d+\.\d{3}", parent.get("time", ""))
        if parent.get("timestamp"):
            assert datetime.fromisoformat(parent.get("timestamp", "")).tzinfo is not None
    return root


def one(verdict: Verdict, **more: Any) -> Attempt:
    stage = Stage.DONE if verdict is Verdict.PASSED else Stage.EXECUTE
    facts = {"device": "virtual-SM8650-0", "started_ms": 1_767_261_601_000, "seconds": 0.5, **more}
    return Attempt("j", verdict, stage, "" if verdict is Verdict.PASSED else f"{verdict} here", **facts)


@pytest.fixture
def outcomes(run_of: Callable[..., RunView]) -> RunView:
    """A finished run with a job of every outcome: passed, failed, known, infra, skipped, skipped, not run."""
    view = run_of(
        (one(Verdict.PASSED),),
        (one(Verdict.FAILED, cause=Cause.CRASH, log="segmentation fault\n"),),
        (one(Verdict.FAILED, known_issue="the SDK is wrong"),),
        (one(Verdict.INFRA, started_ms=0), one(Verdict.INFRA)),
        (one(Verdict.SKIPPED),),
        (),
        (),
    )
    skipped = msgspec.structs.replace(view.jobs[5], skipped=SkipReason("no time was left"))
    return msgspec.structs.replace(view, jobs=(*view.jobs[:5], skipped, view.jobs[6]))


@pytest.mark.parametrize("render", [ctrf, hud, junit])
def test_any_run_is_what_the_format_asks_for(
    render: Callable[[RunView], object], request: pytest.FixtureRequest, run_of: Callable[..., RunView]
) -> None:
    for name in ("example_run", "inside_run", "hostile_run", "outcomes"):
        render(request.getfixturevalue(name))
    render(run_of())
    render(run_of((), finished_ms=None))


@pytest.mark.parametrize("render", [render_ctrf, render_hud])
def test_texts_carry_nothing_that_is_invisible(render: Callable[[RunView], str], hostile_run: RunView) -> None:
    text = json.dumps(json.loads(render(hostile_run)), ensure_ascii=False)
    assert "<script>" in text
    assert not {"\x1b", "\0", "\u202e", "\u200b"} & set(text)
    render(hostile_run).encode()


def test_ctrf_says_of_every_outcome_what_is_so(outcomes: RunView) -> None:
    results = ctrf(outcomes)["results"]
    found = [(test["status"], test["rawStatus"]) for test in results["tests"]]
    assert found == [
        ("passed", "passed"),
        ("failed", "failed"),
        ("other", "known"),
        ("other", "infra"),
        ("skipped", "skipped"),
        ("skipped", "skipped"),
        ("pending", "not_run"),
    ]
    counts = {name: results["summary"][name] for name in ("tests", "passed", "failed", "skipped", "pending", "other")}
    assert counts == {"tests": 7, "passed": 1, "failed": 1, "skipped": 2, "pending": 1, "other": 2}
    assert results["environment"]["healthy"] is False
    passed, failed, known, infra, *_ = results["tests"]
    assert "message" not in passed
    assert (failed["message"], failed["trace"]) == ("failed here", "segmentation fault\n")
    assert known["message"] == "known issue: the SDK is wrong: failed here"
    assert (infra["retries"], infra["duration"], infra["flaky"]) == (1, 1000, False)
    assert [(retry["attempt"], retry["status"], "start" in retry) for retry in infra["retryAttempts"]] == [
        (1, "other", False)
    ]
    assert failed["extra"]["run_again"].startswith("farm run --soc SM8650")


def test_ctrf_times_are_milliseconds(outcomes: RunView) -> None:
    results = ctrf(outcomes)["results"]
    assert (results["summary"]["start"], results["summary"]["stop"]) == (outcomes.started_ms, outcomes.finished_ms)
    passed = results["tests"][0]
    assert (passed["start"], passed["stop"], passed["duration"]) == (1_767_261_601_000, 1_767_261_601_500, 500)
    unfinished = ctrf(msgspec.structs.replace(outcomes, finished_ms=None, exit_code=None))["results"]
    assert unfinished["summary"]["stop"] == 1_767_261_601_500


@pytest.mark.parametrize(
    ("before", "flaky"), [(Verdict.FAILED, True), (Verdict.INFRA, False)], ids=["the code", "the farm"]
)
def test_ctrf_calls_flaky_only_what_failed_by_itself(
    run_of: Callable[..., RunView], before: Verdict, flaky: bool
) -> None:
    (test,) = ctrf(run_of((one(before), one(Verdict.PASSED))))["results"]["tests"]
    assert (test["status"], test["flaky"], test["retries"]) == ("passed", flaky, 1)


def test_ctrf_says_which_devices_are_virtual_and_is_the_same_every_time(example_run: RunView) -> None:
    document = ctrf(example_run)
    assert document["results"]["environment"]["testEnvironment"] == "virtual"
    test = document["results"]["tests"][0]
    assert test["device"] == "virtual-SM8650-0 (virtual)"
    assert "virtual" in test["tags"]
    assert test["extra"]["times_are"] == "host time of a simulator"
    assert render_ctrf(example_run) == render_ctrf(example_run)
    ids = [test["id"] for test in document["results"]["tests"]]
    assert len(set(ids)) == len(ids)


def test_junit_has_the_device_kind_and_every_outcome(outcomes: RunView) -> None:
    cases = list(junit(outcomes).iter("testcase"))
    marks = [[child.tag for child in case if child.tag not in {"properties", "system-out"}] for case in cases]
    assert marks == [[], ["failure"], ["skipped"], ["error"], ["skipped"], ["skipped"], ["skipped"]]


def measured(*rows: Measurement, device: str = "virtual-SM8650-0") -> Attempt:
    return one(Verdict.PASSED, measurements=rows, device=device)


def by_name(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["metric"]["name"]: record for record in records}


def test_the_dashboard_gets_the_names_that_it_knows_in_milliseconds(run_of: Callable[..., RunView]) -> None:
    lower = Direction.LOWER
    rows = (
        Measurement("latency", "ns", lower, (1e6, 2e6, 6e6)),
        Measurement("model_load_time", "ns", lower, (5e8,)),
        Measurement("load_time", "ns", lower, (6e8,)),
        Measurement("pte_size", "bytes", lower, (2**24 + 1,), exact=True),
        Measurement("cosine_fp32[0]", "1", Direction.HIGHER, (0.5,)),
        Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (float("inf"),)),
        Measurement("none", "dB", Direction.HIGHER, ()),
    )
    found = by_name(hud(run_of((measured(*rows),))))
    assert {name: record["metric"]["benchmark_values"] for name, record in found.items()} == {
        "avg_inference_latency(ms)": [3.0],
        "model_load_time(ms)": [500.0],
        "load_time(ms)": [600.0],
        "pte_size(bytes)": [2**24 + 1],
        "cosine_fp32[0]": [0.5],
    }
    latency = found["avg_inference_latency(ms)"]
    assert latency["metric"]["extra_info"]["p50"] == "2.0"
    assert latency["metric"]["extra_info"]["samples"] == "3"
    assert found["pte_size(bytes)"]["metric"]["extra_info"]["exact"] == str(2**24 + 1)
    assert (latency["benchmark"]["name"], latency["benchmark"]["mode"]) == ("ExecuTorch", "inference")
    assert (latency["benchmark"]["dtype"], latency["model"]["backend"]) == ("8a8w", "htp")
    assert (latency["model"]["name"], latency["model"]["type"]) == ("case0", "s")
    assert latency["dependencies"]["executorch"]["version"] == "1.5.1"
    assert latency["dependencies"]["qnn"]["version"] == "2.51.0"


def test_the_dashboard_gets_one_failure_report_for_each_job_that_failed_and_no_number_of_it(outcomes: RunView) -> None:
    records = hud(outcomes)
    assert [record["metric"]["name"] for record in records] == ["FAILURE_REPORT"] * 3
    assert [record["metric"]["benchmark_values"] for record in records] == [[0]] * 3
    failed, known, infra = (record["metric"]["extra_info"] for record in records)
    assert (failed["verdict"], failed["cause"], failed["reason"]) == ("failed", "crash", "failed here")
    assert (known["verdict"], known["known_issue"]) == ("known", "the SDK is wrong")
    assert infra["verdict"] == "infra"


def test_a_virtual_device_does_not_pass_for_a_phone(run_of: Callable[..., RunView]) -> None:
    latency = Measurement("latency", "ns", Direction.LOWER, (1e6,))
    view = run_of(
        (measured(latency),),
        (measured(latency, device="R5CX"),),
        (Attempt("j", Verdict.FAILED, Stage.BUILD, "it does not compile"),),
    )
    devices = (*view.devices, DeviceView("R5CX", "SM8650", "hardware", "samsung/e3q:15"))
    records = hud(msgspec.structs.replace(view, devices=devices))
    virtual, phone, none = (record["runners"][0] for record in records)
    assert (virtual["type"], virtual["cpu_info"]) == ("virtual SM8650, simulated", "SM8650, simulated")
    assert virtual["extra_info"]["device_kind"] == "virtual"
    assert virtual["extra_info"]["times_are"] == "host time of a simulator"
    assert (phone["name"], phone["type"], phone["cpu_info"]) == ("R5CX", "hardware SM8650", "SM8650")
    assert phone["extra_info"]["device_kind"] == "hardware"
    assert (none["name"], none["type"]) == ("", "no device")
