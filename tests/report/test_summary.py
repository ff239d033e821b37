from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable

import msgspec
import pytest
from _pytest.mark.expression import Expression

from farm.report.formats.ctrf import render_ctrf
from farm.report.html.matrix import matrices
from farm.report.model.status import exit_meaning
from farm.report.model.summary import (
    Outcome,
    Tone,
    beyond_comparisons,
    broken_limits,
    key_numbers,
    outcome_of,
    spread_of,
    summarize,
)
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.view import DeviceView, JobView, RunToolchain, RunView

Attempts = Callable[..., tuple[Attempt, ...]]
P, F, I, S = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA, Verdict.SKIPPED  # noqa: E741 - read as a table


def measured(*measurements: Measurement, comparisons: tuple[Comparison, ...] = ()) -> Attempt:
    return Attempt("j", P, Stage.DONE, "", measurements=measurements, comparisons=comparisons)


def job(**more: object) -> JobView:
    return JobView("s/c[SM8650-htp-8a8w]", "s", "c", "SM8650", "htp", "8a8w", (), **more)


def test_no_attempt_is_not_run() -> None:
    assert outcome_of(None) is Outcome.NOT_RUN


def test_a_known_issue_needs_a_failure(make_attempts: Attempts) -> None:
    for verdict, expected in ((F, Outcome.KNOWN), (P, Outcome.PASSED), (I, Outcome.INFRA), (S, Outcome.SKIPPED)):
        (attempt,) = make_attempts(verdict)
        assert outcome_of(msgspec.structs.replace(attempt, known_issue="why")) is expected


def test_the_verdict_line(run_of: Callable[..., RunView], make_attempts: Attempts) -> None:
    fine, bad, lost = make_attempts(P), make_attempts(F), make_attempts(I)
    known = (msgspec.structs.replace(bad[0], known_issue="why"),)

    def line(*attempts: tuple[Attempt, ...], **more: object) -> str:
        return summarize(run_of(*attempts, **more)).verdict_line

    assert line(*[fine] * 98, bad, known, known) == (
        "98 passed, 1 failed, 2 known issues, 0 infra - 1 of 101 jobs needs attention"
    )
    assert line(fine, known) == "1 passed, 0 failed, 1 known issue, 0 infra - none of 2 jobs needs attention"
    assert line(fine, lost, ()) == (
        "1 passed, 0 failed, 0 known issues, 1 infra, 1 not run - 2 of 3 jobs need attention"
    )
    assert line(fine, (), finished_ms=None) == (
        "unfinished: 1 passed, 0 failed, 0 known issues, 0 infra, 1 not run yet - none of 2 jobs needs attention"
    )
    assert line(make_attempts(S)) == (
        "0 passed, 0 failed, 0 known issues, 0 infra, 1 skipped - none of 1 job needs attention"
    )
    assert line() == "no job was selected"


def test_the_tone_follows_the_worst(run_of: Callable[..., RunView], make_attempts: Attempts) -> None:
    fine, bad, lost = make_attempts(P), make_attempts(F), make_attempts(I)
    assert summarize(run_of(fine)).tone is Tone.PASSED
    assert summarize(run_of(fine, lost)).tone is Tone.INFRA
    assert summarize(run_of(fine, lost, bad)).tone is Tone.FAILED
    assert summarize(run_of(fine, finished_ms=None)).tone is Tone.UNFINISHED
    assert summarize(run_of(fine, bad, finished_ms=None)).tone is Tone.FAILED
    assert summarize(run_of()).tone is Tone.EMPTY


def test_every_job_is_counted_once(example_run: RunView) -> None:
    summary = summarize(example_run)
    assert sum(summary.counts.values()) == len(example_run.jobs) == 101
    assert [job.job for job in summary.jobs] == list(example_run.jobs)
    assert summary.counts[Outcome.FAILED] == 2
    assert [job.job.case for job in summary.recovered] == ["softmax"]


def test_what_was_skipped_on_a_virtual_device_is_no_attempt_that_was_tried_again(
    run_of: Callable[..., RunView], make_attempts: Attempts
) -> None:
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
    assert numbers.fallback_ops == 0
    assert numbers.pte_bytes is None


def test_fallback_ops_of_the_build_stand_in_where_none_were_measured() -> None:
    assert key_numbers(job(fallback_ops={"aten::add": 2, "aten::mul": 1}), None).fallback_ops == 3


def test_nan_is_the_worst_of_all() -> None:
    comparisons = (Comparison(0, "fp32", 40.0, 1.0, 0.0, None), Comparison(1, "fp32", math.nan, 1.0, 0.0, None))
    assert math.isnan(key_numbers(job(), measured(comparisons=comparisons)).sqnr_fp32 or 0)


def test_spread_leaves_out_what_is_no_number() -> None:
    spread = spread_of(Measurement("m", "ns", Direction.LOWER, (math.nan, 3.0, 1.0)))
    assert spread is not None
    assert (spread.n, spread.least, spread.p50, spread.p90, spread.most) == (2, 1.0, 2.0, 3.0, 3.0)
    assert spread_of(Measurement("m", "ns", Direction.LOWER, (math.nan,))) is None


def test_numerics_are_not_told_twice() -> None:
    one = Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (30.0,))
    several = Measurement("cosine_fp32[12]", "1", Direction.HIGHER, (0.9, 1.0))
    latency = Measurement("latency", "ns", Direction.LOWER, (1.0,))
    compared = measured(one, several, latency, comparisons=(Comparison(0, "fp32", 30.0, 1.0, 0.0, None),))
    assert beyond_comparisons(compared, samples=True) == (several, latency)
    assert beyond_comparisons(compared, samples=False) == (latency,)
    assert beyond_comparisons(measured(one), samples=False) == (one,)


def test_violations_name_the_number_they_are_about() -> None:
    violations = ("sqnr 12.3 dB < 20 dB", "max_abs 3 > 1", "mismatch 0.5 > 0", "something else")
    comparison = Comparison(0, "fp32", 12.3, 1.0, 3.0, 0.5, violations)
    assert broken_limits(comparison) == {"sqnr_db", "max_abs", "mismatch"}


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
    ("command", "carried"),
    [
        ("farm run --profile detailed --soc SM8650", ["--profile", "detailed"]),
        ("farm run --profile=basic", ["--profile", "basic"]),
        ("farm run --profile detailed --profile basic", ["--profile", "basic"]),
        ("farm run --profile off", []),
        ("farm run --profile 'rm -rf'", []),
        ("farm run", []),
    ],
)
def test_the_rerun_command_looks_as_closely_as_the_run(example_run: RunView, command: str, carried: list[str]) -> None:
    (one, *_) = summarize(msgspec.structs.replace(example_run, command=command)).jobs
    argv = shlex.split(one.rerun)
    where = argv.index("--profile") if "--profile" in argv else len(argv)
    assert argv[where : where + 2] == carried


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("--suite ./", "./"),
        ("--suite=suite.toml", "suite.toml"),
        ("--suite smoke --suite ../", "../"),
        ("--suite my/quantized_ops --suite ./", "my/quantized_ops"),
        ("--suite ./ --suite ../", "quantized_ops"),
    ],
)
def test_the_rerun_command_has_the_path_of_a_suite(example_run: RunView, given: str, again: str) -> None:
    jobs = summarize(msgspec.structs.replace(example_run, command=f"farm run {given}")).jobs
    argv = shlex.split(next(one.rerun for one in jobs if one.job.suite == "quantized_ops"))
    assert argv[argv.index("--suite") + 1] == again


def test_the_rerun_command_is_for_the_devices_that_the_run_asked_for(example_run: RunView) -> None:
    command = "farm run --soc SM8650 --suite quantized_ops --device mid --label=bench"
    (one, *_) = summarize(msgspec.structs.replace(example_run, command=command)).jobs
    assert one.kind == "virtual"  # an attached virtual device: no other is started
    assert "--device mid --label bench" in one.rerun
    assert "--virtual" not in one.rerun


def test_the_rerun_command_compiles_with_the_toolchain_of_the_run(example_run: RunView) -> None:
    selected = msgspec.structs.replace(example_run, toolchain=RunToolchain(name="/home/ada/my tree", private=True))
    argv = shlex.split(summarize(selected).jobs[0].rerun)
    assert argv[argv.index("--toolchain") + 1] == "/home/ada/my tree"
    assert "--toolchain" not in summarize(example_run).jobs[0].rerun


def test_virtual_devices_are_told_from_hardware(run_of: Callable[..., RunView], make_attempts: Attempts) -> None:
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


def test_backend_options_are_targets_of_their_own(run_of: Callable[..., RunView]) -> None:
    jobs = tuple(
        JobView(f"s/c[SM8650-htp-8a8w{named}]", "s", "c", "SM8650", "htp", "8a8w", (), options=options)
        for named, options in (("", {}), ("-htp_performance_mode=2", {"htp_performance_mode": "2"}))
    )
    (matrix,) = matrices(summarize(msgspec.structs.replace(run_of(), jobs=jobs)))
    assert [column.options for column in matrix.columns] == ["", "htp_performance_mode=2"]


def test_every_exit_code_has_a_meaning() -> None:
    assert exit_meaning(0) == "all passed"
    assert exit_meaning(None).startswith("none yet")
    assert exit_meaning(77) == "unknown"
