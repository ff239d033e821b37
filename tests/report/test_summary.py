"""Outcomes and deciding figures of a run, in JUnit, JSON and text, and a failed case on other targets."""

from __future__ import annotations

import json
import math
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from _pytest.mark.expression import Expression

from farm.numbers.compare.measuring import figures_of
from farm.numbers.regressions import stored_pairs
from farm.replay.repro import rows
from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.cross_target import cross_targets
from farm.report.model.diff import diff_runs
from farm.report.model.history import tables
from farm.report.model.summary import Tone, key_numbers, spread_of, summarize
from farm.report.terminal.run import job_lines, render_summary
from farm.report.terminal.status import history_lines
from farm.results.analysis.confirmation import Answer
from farm.results.analysis.statistics import Series
from farm.results.attempt import Attempt, Cause, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.records import CaseResult, DeviceView, HistoryPoint, JobView, RunToolchain, RunView

from .conftest import make_attempts, make_job, make_run, run_of

P, F, I, S = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA, Verdict.SKIPPED  # noqa: E741 - read as a table


def measured(*measurements: Measurement, comparisons: tuple[Comparison, ...] = ()) -> Attempt:
    return Attempt("j", P, Stage.DONE, "", measurements=measurements, comparisons=comparisons)


def job(**more: object) -> JobView:
    return JobView("s/c[SM8650-htp-8a8w]", "s", "c", "SM8650", "htp", "8a8w", (), **more)


def test_the_verdict_line_and_the_tone_follow_the_worst() -> None:
    fine, bad, lost, skipped = map(make_attempts, (P, F, I, S))
    known = (msgspec.structs.replace(bad[0], known_issue="why"),)
    for attempts, finished, tone, line in (
        ([fine], True, Tone.PASSED, "1 passed, 0 failed, 0 known issues, 0 infra - none of 1 job needs"),
        ([fine] * 98 + [bad, known, known], True, Tone.FAILED,
         "98 passed, 1 failed, 2 known issues, 0 infra - 1 of 101 jobs needs"),
        ([fine, known], True, Tone.PASSED, "1 passed, 0 failed, 1 known issue, 0 infra - none of 2 jobs needs"),
        ([fine, lost, ()], True, Tone.INFRA,
         "1 passed, 0 failed, 0 known issues, 1 infra, 1 not run - 2 of 3 jobs need"),
        ([fine, lost, bad], True, Tone.FAILED, "1 passed, 1 failed, 0 known issues, 1 infra - 2 of 3 jobs need"),
        ([fine, ()], False, Tone.UNFINISHED,
         "unfinished: 1 passed, 0 failed, 0 known issues, 0 infra, 1 not run yet - none of 2 jobs needs"),
        ([fine, bad], False, Tone.FAILED,
         "unfinished: 1 passed, 1 failed, 0 known issues, 0 infra - 1 of 2 jobs needs"),
        ([fine, skipped], True, Tone.PASSED,
         "1 passed, 0 failed, 0 known issues, 0 infra, 1 skipped - none of 2 jobs needs"),
        # Nothing has passed.
        ([skipped], True, Tone.EMPTY, "0 passed, 0 failed, 0 known issues, 0 infra, 1 skipped - none of 1 job needs"),
    ):  # fmt: skip
        summary = summarize(run_of(*attempts, **({} if finished else {"finished_ms": None})))
        assert (summary.verdict_line, summary.tone) == (f"{line} attention", tone)
    nothing = summarize(run_of())
    assert (nothing.verdict_line, nothing.tone) == ("no job was selected", Tone.EMPTY)


def test_what_was_skipped_on_a_virtual_device_is_no_attempt_that_was_tried_again() -> None:
    view = run_of(make_attempts(S, P), make_attempts(S, I, P), make_attempts(I, S), make_attempts(S))
    assert [one.retried for one in summarize(view).jobs] == [False, True, True, False]


def test_key_numbers_are_the_worst_output_and_the_median() -> None:
    attempt = measured(
        Measurement("latency", "ns", Direction.LOWER, (9e6, 1e6, 2e6)),
        # Metrics of an older runner, and of today's.
        Measurement("load_time", "ns", Direction.LOWER, (9e6,)),
        Measurement("model_load_time", "ns", Direction.LOWER, (3e6,)),
        Measurement("htp_cycles", "cycles", Direction.LOWER, (1234.0,), exact=True),
        Measurement("fallback_ops", "count", Direction.LOWER, (0.0,), exact=True),
        comparisons=(
            Comparison(0, "fp32", 40.0, 0.999, 0.1, None),
            Comparison(1, "fp32", 20.0, 0.99, 0.3, None),
            Comparison(0, "quantized", math.inf, 1.0, 0.0, None),
            Comparison(2, "quantized", None, None, None, 0.25),
        ),
    )
    numbers = key_numbers(job(fallback_ops={"aten::add": 2}), attempt)
    assert (numbers.sqnr_fp32, numbers.cosine, numbers.max_abs) == (20.0, 0.99, 0.3)
    assert (numbers.sqnr_quantized, numbers.mismatch) == (math.inf, 0.25)
    assert (numbers.latency_ms, numbers.load_ms, numbers.htp_cycles) == (2.0, 3.0, 1234.0)
    assert (numbers.fallback_ops, numbers.pte_bytes) == (0, None)
    without = key_numbers(job(fallback_ops={"aten::add": 2, "aten::mul": 1}), None)
    assert without.fallback_ops == 3, "of the build, where none were measured"
    comparisons = (Comparison(0, "fp32", 40.0, 1.0, 0.0, None), Comparison(1, "fp32", math.nan, 1.0, 0.0, None))
    assert math.isnan(key_numbers(job(), measured(comparisons=comparisons)).sqnr_fp32 or 0), "NaN is the worst"


def test_spread_leaves_out_what_is_no_number() -> None:
    spread = spread_of(Measurement("m", "ns", Direction.LOWER, (math.nan, 3.0, 1.0)))
    assert spread is not None
    assert (spread.n, spread.least, spread.p50, spread.p90, spread.most) == (2, 1.0, 2.0, 3.0, 3.0)
    assert spread_of(Measurement("m", "ns", Direction.LOWER, (math.nan,))) is None


def test_the_rerun_command_selects_the_job_and_no_other(example_run: RunView) -> None:
    summary = summarize(example_run)
    ids = [one.id for one in example_run.jobs]
    for one in summary.jobs:
        argv = shlex.split(one.rerun)
        assert argv[:6] == ["farm", "run", "--soc", one.job.soc, "--suite", one.job.suite]
        assert argv[6:8] == ["--virtual", "1"]
        expression = Expression.compile(argv[-1])
        assert [name for name in ids if expression.evaluate(lambda word, name=name: word in name)] == [one.job.id]


def test_the_rerun_command_stays_a_k_expression_with_options_and_hostile_names(hostile_run: RunView) -> None:
    name = "s/c[SM8650-gpu-fp16-htp_performance_mode=2]"
    target = {"soc": "SM8650", "backend": "gpu", "precision": "fp16", "options": {"htp_performance_mode": "2"}}
    view = msgspec.structs.replace(hostile_run.jobs[0], id=name, suite="s", case="c", **target)
    (summary,) = summarize(msgspec.structs.replace(hostile_run, jobs=(view,))).jobs
    argv = shlex.split(summary.rerun)
    assert argv[6:10] == ["--backend", "gpu", "--option", "htp_performance_mode=2"]
    Expression.compile(argv[-1])
    for one in summarize(hostile_run).jobs:
        Expression.compile(shlex.split(one.rerun)[-1])


@pytest.mark.parametrize(
    ("given", "again", "without"),
    [
        ("--suite ./", "--suite ./", ""),
        ("--suite=suite.toml", "--suite suite.toml", ""),
        ("--suite smoke --suite ../", "--suite ../", ""),
        ("--suite my/quantized_ops --suite ./", "--suite my/quantized_ops", ""),
        ("--suite ./ --suite ../", "--suite quantized_ops", ""),
        ("--profile detailed --soc SM8650", "--profile detailed", ""),
        ("--profile=basic", "--profile basic", ""),
        ("--profile detailed --profile basic", "--profile basic", "detailed"),
        ("--profile off", "", "--profile"),
        ("--profile 'rm -rf'", "", "--profile"),
        # An attached virtual device: no other is started.
        ("--soc SM8650 --device mid --label=bench", "--device mid --label bench", "--virtual"),
    ],
)
def test_the_rerun_command_has_the_options_of_the_run(
    example_run: RunView, given: str, again: str, without: str
) -> None:
    (one, *_) = summarize(msgspec.structs.replace(example_run, command=f"farm run {given}")).jobs
    assert one.kind == "virtual"
    assert not again or f" {again} " in f"{one.rerun} "
    assert not without or without not in one.rerun


def test_the_rerun_command_compiles_with_the_toolchain_of_the_run(example_run: RunView) -> None:
    selected = msgspec.structs.replace(example_run, toolchain=RunToolchain(name="/home/ada/my tree", private=True))
    assert "--toolchain '/home/ada/my tree'" in summarize(selected).jobs[0].rerun
    assert "--toolchain" not in summarize(example_run).jobs[0].rerun


def junit(view: RunView) -> tuple[ET.Element, dict[str, str]]:
    """Return the document and the mark of each job."""
    root = ET.fromstring(render_junit(view))  # noqa: S314 - our own output
    found = {}
    for case in root.iter("testcase"):
        marks = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        assert len(marks) <= 1
        found[f"{case.get('classname')}/{case.get('name')}"] = marks[0] if marks else "passed"
    return root, found


def test_junit_has_every_job_with_its_reason_and_how_to_run_it_again(
    example_run: RunView, hostile_run: RunView
) -> None:
    root, found = junit(example_run)
    assert set(found) == {job.id for job in example_run.jobs}
    assert {name: mark for name, mark in found.items() if mark != "passed"} == {
        "quantized_ops/group_norm[SM8650-htp-8a8w]": "failure",
        "quantized_ops/index_select[SM8750-htp-16a8w]": "failure",
        "quantized_ops/sdpa[SM8750-htp-8a8w]": "error",
        "quantized_ops/linear_shared_weights[SM8650-htp-8a8w]": "skipped",
        "quantized_ops/linear_shared_weights[SM8750-htp-8a8w]": "skipped",
    }
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["101", "2", "1", "2"]
    for suite in root.iter("testsuite"):
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
    failure = root.find(".//testcase[@name='group_norm[SM8650-htp-8a8w]']/failure")
    assert failure is not None
    assert failure.get("type") == "numerics"
    assert "sqnr 11.8 dB < 20 dB" in failure.get("message", "")
    assert "farm run --soc SM8650 --suite quantized_ops" in (failure.text or "")
    known = root.find(".//testcase[@name='linear_shared_weights[SM8650-htp-8a8w]']/skipped")
    assert known is not None
    assert "known issue: shared weights" in known.get("message", "")
    assert root.find(".//testcase/properties/property[@name='device_kind'][@value='virtual']") is not None
    assert sorted(junit(hostile_run)[1].values()) == ["error", "failure", "passed", "skipped", "skipped"]
    render_junit(hostile_run).encode()


def test_json_gives_the_run_back_with_counts_and_version(inside_run: RunView, hostile_run: RunView) -> None:
    assert parse_json(render_json(inside_run)) == inside_run
    document = json.loads(render_json(inside_run))
    assert document["schema"] == 3
    assert document["summary"]["counts"]["failed"] == 3
    assert document["summary"]["outcomes"]["quantized_ops/sdpa[SM8750-htp-8a8w]"] == "infra"
    text = render_json(hostile_run)
    comparison = json.loads(text)["jobs"][0]["attempts"][0]["comparisons"][0]
    assert (comparison["max_abs"], comparison["cosine"]) == ("inf", None), "infinity is no missing figure"
    (row, _) = parse_json(text.encode()).jobs[0].attempts[0].operators
    assert (math.isnan(row.p50), row.least) == (True, -math.inf)
    with pytest.raises(msgspec.ValidationError):
        parse_json('{"id": 1}')


def test_the_terminal_summary_is_short_and_names_the_trouble(example_run: RunView) -> None:
    text = render_summary(example_run, 80)
    lines = text.splitlines()
    assert lines[0] == "96 passed, 2 failed, 2 known issues, 1 infra - 3 of 101 jobs need attention"
    assert "VIRTUAL" in text
    assert "FAILED quantized_ops/group_norm[SM8650-htp-8a8w]" in lines
    assert "INFRA quantized_ops/sdpa[SM8750-htp-8a8w]" in lines
    assert "known issues, 2x: shared weights" in text
    assert len(lines) < 20
    assert all(len(line) <= 80 for line in lines if not line.startswith("again:"))
    failed = Attempt("j", Verdict.FAILED, Stage.NUMERICS, "output 0: sqnr 12.0 dB < 20 dB")
    bad_night = render_summary(run_of(*[(failed,)] * 50), 80)
    assert "and 40 more FAILED" in bad_night
    assert len(bad_night.splitlines()) < 40


def test_details_of_a_success_leave_room_for_the_rest() -> None:
    reasons = [f"no DSP heap: cause {n}" for n in range(20)]
    skipped = [Attempt("j", Verdict.SKIPPED, Stage.EXECUTE, one, "phone-1", cause=Cause.REQUEST) for one in reasons]
    lines = render_summary(run_of(*((one,) for one in skipped)), 80).splitlines()
    assert reasons[0] in "".join(lines)
    assert len(lines) <= 9
    assert lines[-1].startswith("and ")
    assert lines[-1].endswith(" lines more in the report")


def test_the_terminal_summary_lets_no_escape_sequence_or_markup_through(hostile_run: RunView) -> None:
    text = render_summary(hostile_run, 80)
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    view = run_of((Attempt("j", Verdict.FAILED, Stage.BUILD, "[bold]loud[/bold] [/nope]"),))
    assert "build: [bold]loud[/bold] [/nope]" in render_summary(view, 80, color=True)


# Displays of a figure have the value that decides: the worst sample, or the mean where the limit is for that.


def attempt(*sqnr: float, top1: tuple[float, ...] = (), verdict: Verdict = Verdict.PASSED) -> Attempt:
    measured = [
        Measurement("latency", "ns", Direction.LOWER, (2e6, 1e6, 9e6)),
        Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, sqnr),
    ]
    if top1:
        measured.append(Measurement("top1[0]", "1", Direction.HIGHER, top1))
    compared = (Comparison(0, "fp32", min(sqnr), 0.9, 0.1, None),)
    return Attempt("j", verdict, Stage.DONE, "", "virtual-SM8650-0", comparisons=compared, measurements=tuple(measured))


def test_one_place_names_the_value_that_decides() -> None:
    sqnr = Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (38.65, 38.70, 38.35))
    mean = Measurement("top1[0]", "1", Direction.HIGHER, (1.0, 1.0, 0.0, 0.0, 0.0))
    latency = Measurement("latency", "ns", Direction.LOWER, (2e6, 1e6, 9e6))
    assert [one.value for one in (sqnr, mean, latency)] == [38.35, 0.4, 2e6]
    spreads = [spread_of(one) for one in (sqnr, mean, latency)]
    assert [(one.value, one.p50) for one in spreads if one] == [(38.35, 38.65), (0.4, 0.0), (2e6, 2e6)]
    past: Any = SimpleNamespace(attempt=attempt(38.65, 38.70, 38.35))
    assert stored_pairs._value(past, Series("", "sqnr_fp32[0]", "dB", Direction.HIGHER)) == 38.35


def test_show_and_page_have_the_value_that_decides() -> None:
    view = run_of((attempt(38.65, 38.70, 38.35, top1=(1.0, 1.0, 0.0, 0.0, 0.0), verdict=Verdict.FAILED),))
    lines = job_lines(summarize(view), summarize(view).jobs[0], (), {})
    words = [line.split() for line in lines if re.match(r"  (latency|sqnr_fp32|top1)\b", line)]
    assert [line[1] for line in words] == ["2.000", "38.4", "0.4"]
    page = render_html(view)
    cells = re.findall(r'<tr><th scope="row">(latency|sqnr_fp32\[0\]|top1\[0\]).*?</th><td>(.*?)</td>', page)
    assert dict(cells) == {"latency": "2.000 ms", "sqnr_fp32[0]": "38.4 dB", "top1[0]": "0.4"}


def test_two_runs_differ_by_the_value_that_decides() -> None:
    before, after = run_of((attempt(38.65, 38.70, 38.35),)), run_of((attempt(38.65, 38.70, 30.0),))
    [change] = diff_runs(before, after).jobs[0].changes
    assert (change.metric, change.before, change.after, change.worse) == ("sqnr_fp32[0]", 38.35, 30.0, True)
    [lost] = diff_runs(before, run_of((attempt(38.65, math.nan, 38.35),))).jobs[0].changes
    assert lost.worse
    assert math.isnan(lost.after)
    same = run_of((attempt(38.35, 45.0, 45.0),))
    assert diff_runs(before, same).jobs[0].changes == ()


def test_a_result_run_again_is_compared_by_the_value_that_decides() -> None:
    then, now = attempt(30.0, top1=(1.0, 1.0, 1.0, 0.0)), attempt(30.0, top1=(1.0, 1.0, 0.0, 0.0, 0.0))
    found = {one.name: (one.then, one.now) for one in rows(then, now)}
    assert found["top1[0]"] == (0.75, 0.4)
    assert found["latency"] == (2e6, 2e6)


def test_two_sides_are_compared_by_the_value_that_decides() -> None:
    [sqnr] = figures_of(attempt(38.65, 38.70, 38.35), attempt(38.65, 38.70, 30.0))
    assert sqnr.pairs == (((38.35,), (30.0,)),)
    assert sqnr.worse.change == pytest.approx(-8.35)
    number, none = attempt(38.65), attempt(math.nan)
    for sides in ((number, none), (none, number)):
        [sqnr] = figures_of(*sides)
        assert sqnr.worse.answer is sqnr.better.answer is Answer.UNKNOWN, "no number is not the same"
    [same] = figures_of(number, number)
    assert same.worse.answer is Answer.REFUTED


def test_a_history_shows_the_digits_that_decide() -> None:
    # With two decimals, a cosine that passes 0.9995 and a cosine that fails would both be 1.00.
    points = [
        HistoryPoint(
            "s/c[x]", f"run-{number}", number, "f", "v", "d", "hardware", "passed", "", "cosine_fp32[0]", "1",
            "higher", exact=False, value=value, n=3,
        )
        for number, value in enumerate((0.99961, 0.99912))
    ]  # fmt: skip
    text = "\n".join(history_lines(tables(points, ["cosine_fp32[0]"], {}), {}, ()))
    assert "0.99961" in text
    assert "0.99912" in text


# A failed case on other targets, as a reader meets it: terminal, page and JSON.


NOW = 1_795_225_501_000
DAY = 86_400_000
PASSED, FAILED, INFRA = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA
OTHER_RUN = "20261101-010101-aaaaaa"


def job_id(soc: str, precision: str = "8a8w", backend: str = "htp") -> str:
    return f"ops/conv2d[{soc}-{backend}-{precision}]"


def attempt_here(name: str, verdict: Verdict, days: int = 0, known: str = "", sqnr: float = 12.0) -> Attempt:
    reason = "" if verdict is PASSED else "output 0: sqnr 12 dB < 30 dB"
    figures = (Comparison(0, "fp32", sqnr, 0.9, 0.1, None),)
    stage = Stage.DONE if verdict is PASSED else Stage.NUMERICS
    return Attempt(
        name, verdict, stage, reason, "v1", NOW - days * DAY, 0.1, known_issue=known, comparisons=figures, log="a log"
    )


def elsewhere(soc: str, verdict: Verdict, precision: str = "8a8w", backend: str = "htp", **more: Any) -> CaseResult:
    run_id, kind, version = more.pop("run_id", OTHER_RUN), more.pop("kind", "virtual"), more.pop("version", "1")
    name = job_id(soc, precision, backend)
    found = attempt_here(name, verdict, **more)
    return CaseResult(name, soc, backend, precision, run_id, NOW - 9 * DAY, kind, found, version)


def run(*others: CaseResult, jobs: Sequence[JobView] = ()) -> RunView:
    soc = "SM8450"
    red = make_job("ops", "conv2d", soc, "8a8w", attempt_here(job_id(soc), FAILED), case_version="1", elsewhere=others)
    devices = (DeviceView("v1", soc, "virtual", "simulator"),)
    return make_run((red, *jobs), devices, id="r1", started_ms=NOW, finished_ms=NOW + 1000)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([], ""),
        ([elsewhere("SM8550", INFRA)], ""),
        ([elsewhere("SM8550", PASSED)], "fails on SM8450 (V69) alone, passes on SM8550"),
        ([elsewhere("SM8550", FAILED), elsewhere("SM8650", FAILED, known="so")], "fails on all 3 SoCs that were tried"),
        ([elsewhere("SM8350", FAILED), elsewhere("SM8550", PASSED), elsewhere("SM8650", PASSED)],
         "fails on V68, V69, passes on V73, V75"),
        # Two SoCs of an architecture differ: the architecture is not the cause.
        ([elsewhere("SM8475", PASSED), elsewhere("SM8650", FAILED)], "fails on SM8450, SM8650, passes on SM8475"),
        ([elsewhere("XYZ1", PASSED), elsewhere("XYZ2", FAILED)], "fails on SM8450, XYZ2, passes on XYZ1"),
        ([elsewhere("SM8450", PASSED, "16a8w")], "passes here in 16a8w"),
        ([elsewhere("SM8450", FAILED, "16a8w")], "fails here in every precision that was tried"),
        ([elsewhere("SM8550", FAILED), elsewhere("SM8450", PASSED, "fp32", "xnnpack"),
          elsewhere("SM8450", FAILED, "16a8w")],
         "fails on both SoCs that were tried; passes here in fp32 on xnnpack, fails in 16a8w"),
        ([elsewhere("SM8550", PASSED, kind="hardware")], "fails on SM8450 (V69) alone, passes on SM8550 (hardware)"),
        ([elsewhere(f"S{n}", PASSED) for n in range(9)],
         "fails on SM8450 (V69) alone, passes on S0, S1, S2, S3, S4, S5 and 3 more"),
    ],
)  # fmt: skip
def test_the_conclusion_is_one_line(others: list[CaseResult], says: str) -> None:
    (cross,) = cross_targets(summarize(run(*others))).values()
    assert cross.conclusion == says


def test_the_end_of_a_run_has_a_line_under_each_failure() -> None:
    lines = render_summary(run(elsewhere("SM8550", PASSED), elsewhere("SM8450", PASSED, "16a8w"))).splitlines()
    below = lines[lines.index(f"FAILED {job_id('SM8450')}") + 1 :]
    assert below[0] == "  numerics: output 0: sqnr 12 dB < 30 dB"
    assert below[1].startswith("  elsewhere: passed on SM8550")
    assert max(len(line) for line in lines if ": farm " not in line) <= 80
    assert "elsewhere" not in render_summary(run())


def test_the_page_has_a_row_for_every_place_and_links_to_those_of_the_run() -> None:
    green = make_job("ops", "conv2d", "SM8550", "8a8w", attempt_here(job_id("SM8550"), PASSED))
    here = elsewhere("SM8550", PASSED, run_id="r1", sqnr=41.25)
    page = render_html(run(here, elsewhere("SM8650", FAILED, days=3, version="0", sqnr=math.nan), jobs=[green]))
    rows = page[page.index("The same case elsewhere") :].partition("</table>")[0]
    for text in ('<a href="#j1" class="passed">', "41.2", "this run", OTHER_RUN, "case changed since", "NaN"):
        assert text in rows
    assert "Fails on V69, V75, passes on V73" in page
    assert "No comparison: this case" in render_html(run())


def test_json_has_results_and_conclusions_and_is_read_back() -> None:
    view = run(elsewhere("SM8550", PASSED, sqnr=math.inf))
    document = json.loads(render_json(view))
    assert document["summary"]["worth"] == {job_id("SM8450"): "fails on SM8450 (V69) alone, passes on SM8550"}
    found = document["jobs"][0]["elsewhere"][0]
    assert (found["soc"], found["attempt"]["verdict"], found["run_id"]) == ("SM8550", "passed", OTHER_RUN)
    assert parse_json(render_json(view)) == view
