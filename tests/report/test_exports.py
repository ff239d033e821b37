"""Exports and traces: valid in their formats, with true facts about every job."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from export_schemas import HUD, JUNIT, TRACE
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from receivers import web_server
from recipe import FarmCopy, recipe_code

from farm.report.formats import export_formats
from farm.report.formats.hud import render_hud
from farm.report.formats.junit import render_junit
from farm.report.formats.spans import send_spans
from farm.report.formats.trace import run_trace
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.records import DeviceView, RunRecord, RunView, SkipReason
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

from .conftest import run_of

# Exports: valid in their formats, with true facts about every job; spans; and the recipe for a format.


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
def outcomes() -> RunView:
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


@pytest.mark.parametrize("render", [hud, junit])
def test_any_run_is_what_the_format_asks_for_without_invisible_text(
    render: Callable[[RunView], object], request: pytest.FixtureRequest
) -> None:
    for name in ("inside_run", "outcomes"):
        render(request.getfixturevalue(name))
    render(run_of())
    render(run_of((), finished_ms=None))
    hostile = render(request.getfixturevalue("hostile_run"))
    if not isinstance(hostile, ET.Element):
        text = json.dumps(hostile, ensure_ascii=False)
        assert "<script>" in text
        assert not {"\x1b", "\0", "\u202e", "\u200b"} & set(text)
        text.encode()


def test_junit_has_every_outcome(outcomes: RunView) -> None:
    cases = list(junit(outcomes).iter("testcase"))
    marks = [[child.tag for child in case if child.tag not in {"properties", "system-out"}] for case in cases]
    assert marks == [[], ["failure"], ["skipped"], ["error"], ["skipped"], ["skipped"], ["error"]]


def measured(*rows: Measurement, device: str = "virtual-SM8650-0") -> Attempt:
    return one(Verdict.PASSED, measurements=rows, device=device)


def test_the_dashboard_gets_the_names_that_it_knows_in_milliseconds() -> None:
    lower, higher = Direction.LOWER, Direction.HIGHER
    rows = (
        Measurement("latency", "ns", lower, (1e6, 2e6, 6e6)),
        Measurement("model_load_time", "ns", lower, (5e8,)),
        Measurement("load_time", "ns", lower, (6e8,)),
        Measurement("pte_size", "bytes", lower, (2**24 + 1,), exact=True),
        # The value that decides is the worst.
        Measurement("sqnr_quantized[0]", "dB", higher, (38.65, 38.70, 38.35)),
        Measurement("sqnr_fp32[0]", "dB", higher, (float("inf"),)),
        Measurement("none", "dB", higher, ()),
    )
    found = {record["metric"]["name"]: record for record in hud(run_of((measured(*rows),)))}
    assert {name: record["metric"]["benchmark_values"] for name, record in found.items()} == {
        "avg_inference_latency(ms)": [3.0], "model_load_time(ms)": [500.0], "load_time(ms)": [600.0],
        "pte_size(bytes)": [2**24 + 1], "sqnr_quantized[0](dB)": [38.35],
    }  # fmt: skip
    latency = found["avg_inference_latency(ms)"]
    assert latency["metric"]["extra_info"].items() >= {"p50": "2.0", "samples": "3"}.items()
    assert found["pte_size(bytes)"]["metric"]["extra_info"]["exact"] == str(2**24 + 1)
    assert latency["benchmark"].items() >= {"name": "ExecuTorch", "mode": "inference", "dtype": "8a8w"}.items()
    assert latency["model"].items() >= {"name": "case0", "type": "s", "backend": "htp"}.items()
    versions = {name: latency["dependencies"][name]["version"] for name in ("executorch", "qnn")}
    assert versions == {"executorch": "1.5.1", "qnn": "2.51.0"}


def test_the_dashboard_gets_one_failure_report_for_each_job_that_failed_and_no_number_of_it(outcomes: RunView) -> None:
    metrics = [record["metric"] for record in hud(outcomes)]
    assert [(metric["name"], metric["benchmark_values"]) for metric in metrics] == [("FAILURE_REPORT", [0])] * 3
    failed, known, infra = (metric["extra_info"] for metric in metrics)
    assert (failed["verdict"], failed["cause"], failed["reason"]) == ("failed", "crash", "failed here")
    assert (known["verdict"], known["known_issue"]) == ("known", "the SDK is wrong")
    assert infra["verdict"] == "infra"


def test_a_virtual_device_does_not_pass_for_a_phone() -> None:
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


def test_a_run_is_a_span_with_one_per_attempt(example_run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url(""))
        assert send_spans(example_run) == ""
    request = ExportTraceServiceRequest.FromString(endpoint.bodies[0])
    spans = [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    [root] = [span for span in spans if not span.parent_span_id]
    attempts = [one for job in example_run.jobs for one in job.attempts]
    assert root.name == f"farm run {example_run.id}"
    assert root.start_time_unix_nano == example_run.started_ms * 10**6
    assert len(spans) == 1 + len(attempts)
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    verdicts = [item.value.string_value for span in spans for item in span.attributes if item.key == "farm.verdict"]
    assert sorted(verdicts) == sorted(str(one.verdict) for one in attempts)


def test_without_an_endpoint_nothing_is_sent_and_a_refusal_is_told(
    example_run: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert send_spans(example_run) == ""
    with web_server([400]) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url(""))
        assert "no spans were sent" in send_spans(example_run)


ROOT = Path(__file__).parents[2]
EXPORTS = (ROOT / "docs/reference/exports.md").read_text(encoding="utf-8")
JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))


def test_the_documentation_has_a_row_for_each_format() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (one run|runs) \| `\.([\w.]+)` \| (.*) \|$", EXPORTS, re.MULTILINE)
    assert rows == [
        (one.name, "runs" if one.several_runs else "one run", one.suffix, one.about)
        for one in export_formats().values()
    ]


def test_the_recipe_adds_a_format(tmp_path: Path, farm_cache: Path) -> None:
    recipe = (ROOT / "docs/developers/recipes.md").read_text().partition("## Adding a format")[2]
    name = re.findall(r"`(farm/report/formats/\w+\.py)`", recipe)[0]
    (code,) = recipe_code("developers/recipes.md", "Adding a format")
    copy = FarmCopy.make(tmp_path, farm_cache)
    (tmp_path / name).write_text(code, encoding="utf-8")
    state = tmp_path / "state"
    state.mkdir()
    with open_store(state / "farm.db") as store:
        run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {}, 1_790_000_000_000))
        store.plan_jobs(run_id, [JOB])
        store.record_attempt(run_id, Attempt(JOB.id, Verdict.FAILED, Stage.BUILD, "no such operator"), None)
        store.finish_run(run_id, 1)
    night = tmp_path / "nightly.toml"
    night.write_text(
        '[nightly]\nname = "n"\n[[run]]\nsocs = ["SM8650"]\nsuites = ["smoke"]\nvirtual = 1\n'
        '[export]\nfolder = "out"\nformats = ["tsv", "xlsx"]\n',
        encoding="utf-8",
    )
    done = copy.farm("data", "export", run_id, "--format", "tsv")
    assert (done.returncode, done.stdout) == (0, f"{JOB.id}\tfailed\tNone\n"), done.stderr
    checked = copy.farm("nightly", "--check", str(night))
    assert checked.returncode == 2
    assert "export.formats: unknown format 'xlsx': known are hud, jsonl, junit, trace, tsv" in checked.stderr


# Traces: valid in the Trace Event Format.


def well_formed(made: dict[str, Any], categories: set[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a trace as a reader loads it, and its complete events, after checking it against the format."""
    trace = json.loads(msgspec.json.encode(made))
    TRACE.validate(trace)
    named = {one["tid"] for one in trace["traceEvents"] if one["ph"] == "M"}
    complete = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {one["tid"] for one in complete} <= named
    assert {one["cat"] for one in complete} <= categories
    return trace, complete


def spans(events: Iterable[dict[str, Any]], track: int) -> list[tuple[str, int, int]]:
    return [
        (one["name"], round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000))
        for one in events
        if one["tid"] == track
    ]


VERDICTS = set(Verdict)


def tracks_of(trace: dict[str, Any]) -> dict[str, int]:
    return {one["args"]["name"]: one["tid"] for one in trace["traceEvents"] if one["name"] == "thread_name"}


def test_a_run_has_a_track_for_each_device_and_a_slice_for_each_attempt(example_run: RunView) -> None:
    trace, slices = well_formed(run_trace(example_run), VERDICTS)
    assert len(slices) == sum(len(job.attempts) for job in example_run.jobs)
    tracks = tracks_of(trace)
    assert set(tracks) == {"virtual-SM8650-0 (virtual)", "virtual-SM8750-0 (virtual)", "no device"}
    [failed] = [one for one in slices if one["cat"] == "failed" and "group_norm" in one["name"]]
    assert (failed["tid"], failed["ts"], failed["dur"]) == (
        tracks["virtual-SM8650-0 (virtual)"], 61_000_000.0, 310_000.0,
    )  # fmt: skip
    assert failed["args"]["verdict"] == "failed"
    assert failed["args"]["reason"].startswith("output 0 against fp32: sqnr 11.8 dB < 20 dB")
    retried = [one["args"]["attempt"] for one in slices if "softmax[SM8650-htp-16a8w]" in one["name"]]
    assert sorted(retried) == [1, 2]
    assert (trace["otherData"]["device_kinds"], trace["otherData"]["not_shown"]) == ("virtual", "0")


def test_slices_of_one_device_never_overlap_and_say_how_long_the_attempt_was() -> None:
    def at(ms: int, seconds: float) -> tuple[Attempt, ...]:
        return (Attempt("j", Verdict.PASSED, Stage.DONE, "", "virtual-SM8650-0", 1000 + ms, seconds),)

    view = run_of(at(20, 0.03), at(0, 0.025), at(-5, 0.001), (), at(-1000, 9.0), started_ms=1000)
    trace, slices = well_formed(run_trace(view), VERDICTS)
    (track,) = {one["tid"] for one in slices}
    found = sorted((start, end) for _, start, end in spans(slices, track))
    assert found == [(0, 1_000_000), (5_000_000, 25_000_000), (25_000_000, 55_000_000)]
    assert [one["args"]["seconds"] for one in slices] == [0.001, 0.025, 0.03]
    # The idle device has its row; attempts without a time are counted.
    assert len(tracks_of(trace)) == 2
    assert trace["otherData"]["not_shown"] == "1"


def test_the_trace_of_any_run_is_well_formed(hostile_run: RunView) -> None:
    for view in (run_of(), run_of((), finished_ms=None)):
        well_formed(run_trace(view), VERDICTS)
    trace, slices = well_formed(run_trace(hostile_run), VERDICTS)
    assert len(slices) == 5
    assert not {"\x1b", "\u202e", "\0"} & set(json.dumps(trace, ensure_ascii=False))
