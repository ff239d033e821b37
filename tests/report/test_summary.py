from __future__ import annotations

import json
import math
import shlex

import msgspec
import pytest
from _pytest.mark.expression import Expression

from farm.report.formats.ctrf import render_ctrf
from farm.report.html.page_of_run import matrices
from farm.report.model.summary import Outcome, Tone, key_numbers, outcome_of, spread_of, summarize
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.view import DeviceView, JobView, RunToolchain, RunView

from .conftest import make_attempts, run_of

P, F, I, S = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA, Verdict.SKIPPED  # noqa: E741 - read as a table


def measured(*measurements: Measurement, comparisons: tuple[Comparison, ...] = ()) -> Attempt:
    return Attempt("j", P, Stage.DONE, "", measurements=measurements, comparisons=comparisons)


def job(**more: object) -> JobView:
    return JobView("s/c[SM8650-htp-8a8w]", "s", "c", "SM8650", "htp", "8a8w", (), **more)


def test_a_known_issue_needs_a_failure() -> None:
    assert outcome_of(None) is Outcome.NOT_RUN
    for verdict, expected in ((F, Outcome.KNOWN), (P, Outcome.PASSED), (I, Outcome.INFRA), (S, Outcome.SKIPPED)):
        (attempt,) = make_attempts(verdict)
        assert outcome_of(msgspec.structs.replace(attempt, known_issue="why")) is expected


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
    tests = json.loads(render_ctrf(view))["results"]["tests"]
    assert [(one["retries"], len(one.get("retryAttempts", []))) for one in tests] == [(0, 0), (1, 1), (1, 1), (0, 0)]


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


def test_virtual_devices_are_told_from_hardware() -> None:
    (attempt,) = make_attempts(P)
    on = [(msgspec.structs.replace(attempt, device=serial),) for serial in ("virtual-SM8650-0", "R5CT1", "gone")]
    view = run_of(*on)
    view = msgspec.structs.replace(view, devices=(*view.devices[:1], DeviceView("R5CT1", "SM8650", "hardware", "b")))
    summary = summarize(view)
    assert [one.kind for one in summary.jobs] == ["virtual", "hardware", ""]
    assert summary.mixed
    assert "--virtual" not in summary.jobs[1].rerun
    assert [column.kind for column in matrices(summary)[0].columns] == ["mixed"]


def test_a_matrix_has_every_job_once_and_only_the_targets_of_its_suite(example_run: RunView) -> None:
    summary = summarize(example_run)
    ops, models = matrices(summary)
    assert (ops.suite, models.suite) == ("quantized_ops", "models")
    assert ops.socs == (("SM8650", 2), ("SM8750", 2))
    assert [(column.soc, column.precision) for column in models.columns] == [("SM8650", "8a8w")]
    inside = [one for m in (ops, models) for row in m.rows for cell in row.cells for one in cell]
    assert sorted(one.index for one in inside) == list(range(101))


def test_backend_options_are_targets_of_their_own() -> None:
    jobs = tuple(
        JobView(f"s/c[SM8650-htp-8a8w{named}]", "s", "c", "SM8650", "htp", "8a8w", (), options=options)
        for named, options in (("", {}), ("-htp_performance_mode=2", {"htp_performance_mode": "2"}))
    )
    (matrix,) = matrices(summarize(msgspec.structs.replace(run_of(), jobs=jobs)))
    assert [column.options for column in matrix.columns] == ["", "htp_performance_mode=2"]
