"""Figures of outputs with their limits, outputs by name, and executions of an attempt with other outputs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from recipe import FarmCopy, recipe_code

from farm.devices.execution.content_store import options_for
from farm.devices.execution.raw import RunnerOptions
from farm.results.attempt import Attempt, Cause, Direction, Stage, Verdict
from farm.results.measurements import measure
from farm.results.numerics import Figures, compare, is_decided, is_equal, signal_problem, violations, with_loss
from farm.suites.figures import FIGURES, psnr_db, top1_agreement
from farm.suites.suite import KnownIssue, Limits, Metric

from .conftest import PATIENT, Execution

# Figures of outputs with their limits, and executions of an attempt with other outputs.


# Figures of outputs, their limits, and metrics beyond closeness.


SHAPES = hnp.array_shapes(max_dims=3, max_side=6)
ORDINARY = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


PAIRS = SHAPES.flatmap(lambda shape: st.tuples(*[hnp.arrays(np.float32, shape, elements=ORDINARY)] * 2))


@settings(PATIENT, max_examples=50)
@given(PAIRS)
def test_figures_are_their_definitions(pair: tuple[np.ndarray, np.ndarray]) -> None:
    actual, reference = pair
    figures = compare(actual, reference)
    r, a = [float(x) for x in reference.flat], [float(x) for x in actual.flat]
    signal, noise = sum(x * x for x in r), sum((x - y) ** 2 for x, y in zip(r, a, strict=True))
    norms = math.sqrt(signal) * math.sqrt(sum(x * x for x in a))
    assert figures.max_abs == max(abs(x - y) for x, y in zip(r, a, strict=True))
    if noise == 0:
        assert (figures.sqnr_db, figures.cosine) == (math.inf, 1.0)
    else:
        expected = 10 * math.log10(signal / noise) if signal else -math.inf
        assert figures.sqnr_db == pytest.approx(expected, abs=1e-6)
        expected = sum(x * y for x, y in zip(r, a, strict=True)) / norms if norms else 0.0
        assert figures.cosine == pytest.approx(expected, abs=1e-9)
    assert figures.mismatch is None


@settings(PATIENT, max_examples=50)
@given(
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)),
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)),
)
def test_no_value_whatever_gives_nan_or_a_false_equal(actual: np.ndarray, reference: np.ndarray) -> None:
    if actual.shape != reference.shape:
        with pytest.raises(ValueError, match="the reference is"):
            compare(actual, reference)
        return
    figures = compare(actual, reference)
    equal = bool(np.array_equal(actual, reference, equal_nan=True))
    assert (figures.sqnr_db == math.inf) == equal
    assert not any(
        value is not None and math.isnan(value) for value in (figures.sqnr_db, figures.cosine, figures.max_abs)
    )
    assert equal or violations(figures, Limits(max_abs=0.0))


@settings(PATIENT, max_examples=50)
@given(hnp.arrays(np.int32, (7,), elements=st.integers(-2, 2)), hnp.arrays(np.int32, (7,), elements=st.integers(-2, 2)))
def test_integers_are_counted_not_averaged(actual: np.ndarray, reference: np.ndarray) -> None:
    differing = sum(x != y for x, y in zip(actual.tolist(), reference.tolist(), strict=True))
    assert compare(actual, reference) == Figures(mismatch=differing / 7)
    least, greatest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    for one, other in (([True, False], [True, True]), ([least, least], [greatest, least])):
        assert compare(np.array(one), np.array(other)).mismatch == 0.5


def test_sqnr_depends_on_no_scale_and_a_tiny_difference_is_none_the_less_one() -> None:
    reference = np.array([1.0, 2.0, -3.0])
    for scale in (1e-300, 1e-30, 1.0, 1e30, 1e300):
        assert compare(reference * scale * 1.1, reference * scale).sqnr_db == pytest.approx(20.0)
    tiny = compare(np.array([1.0, 2e-200]), np.array([1.0, 1e-200])).sqnr_db
    assert tiny is not None
    assert 2000 < tiny < math.inf


def test_equal_infinities_are_equal_and_stay_out_of_the_sums() -> None:
    figures = compare(np.array([math.inf, -math.inf, 1.1]), np.array([math.inf, -math.inf, 1.0]))
    assert figures.sqnr_db == pytest.approx(20.0)
    assert figures.infinite == 0
    assert compare(np.array([math.nan]), np.array([math.nan])).sqnr_db == math.inf


@pytest.mark.parametrize(("actual", "reference"), [(math.inf, 1.0), (1.0, math.inf), (math.inf, -math.inf)])
def test_a_stray_infinity_breaks_any_limit_and_only_then(actual: float, reference: float) -> None:
    figures = compare(np.array([actual, 1.0]), np.array([reference, 1.0]))
    assert (figures.infinite, figures.sqnr_db, figures.max_abs) == (1, -math.inf, math.inf)
    assert violations(figures, Limits()) == ()
    for limits in (Limits(sqnr_db=-300.0), Limits(cosine=-1.0), Limits(max_abs=1e300)):
        assert [v.text for v in violations(figures, limits)] == ["1 elements are not finite as in the reference"]


def test_dtypes_must_agree_and_be_comparable() -> None:
    with pytest.raises(ValueError, match=r"is float32\[2\], the reference is float64\[2\]"):
        compare(np.zeros(2, np.float32), np.zeros(2, np.float64))
    with pytest.raises(ValueError, match="complex64 outputs cannot be compared"):
        compare(np.zeros(2, np.complex64), np.zeros(2, np.complex64))


TRUE_FIGURES = Figures(sqnr_db=12.34567, cosine=0.9, max_abs=0.5)


@pytest.mark.parametrize(
    ("figures", "limits", "texts"),
    [
        (TRUE_FIGURES, Limits(sqnr_db=12.0, cosine=0.9, max_abs=0.5), []),
        (TRUE_FIGURES, Limits(sqnr_db=20.0), ["sqnr 12.35 dB < 20 dB"]),
        (TRUE_FIGURES, Limits(cosine=0.99), ["cosine 0.9 < 0.99"]),
        (TRUE_FIGURES, Limits(mismatch=0.0), []),
        (Figures(mismatch=0.25), Limits(sqnr_db=99.0, mismatch=0.2), ["mismatch 0.25 > 0.2"]),
        (Figures(sqnr_db=19.99999), Limits(sqnr_db=20.0), ["sqnr 19.99999 dB < 20 dB"]),
        (TRUE_FIGURES, Limits(sqnr_db=13.0, max_abs=0.005), ["max_abs 0.5 > 0.005", "sqnr 12.35 dB < 13 dB"]),
        (Figures(peak=0.2), Limits(peak=0.1), ["peak 0.2 > 0.1"]),
        (Figures(steps=3.0), Limits(steps=2.0), ["steps 3 > 2"]),
        (Figures(max_abs=1.0), Limits(steps=2.0), []),
        (Figures(loss_db=4.5), Limits(loss_db=3.0), ["loss 4.5 dB > 3 dB"]),
        (Figures(sqnr_db=math.inf, cosine=1.0, max_abs=0.0), Limits(sqnr_db=1e9, cosine=1.0, max_abs=0.0), []),
    ],
)
def test_violations_say_value_and_limit_worst_first(figures: Figures, limits: Limits, texts: list[str]) -> None:
    assert [violation.text for violation in violations(figures, limits)] == texts


def test_a_difference_is_counted_in_steps_of_the_output_and_as_a_share_of_the_peak() -> None:
    step = np.float32(0.1)
    reference = np.array([-4, 0, 10, 20], np.float32) * step
    moved = reference + np.array([0, 2, 0, -1], np.float32) * step
    figures = compare(moved, reference, float(step))
    assert figures.steps == 2.0
    assert figures.peak == pytest.approx(0.1, rel=1e-6)
    assert compare(reference, reference, float(step)).steps == 0.0
    assert compare(moved, reference).steps is None
    assert compare(np.zeros(4, np.int64), np.ones(4, np.int64), float(step)).steps is None


def test_loss_is_what_comes_on_top_of_the_quantized_reference() -> None:
    for own, quantized, loss in (
        (36.0, 40.0, 4.0), (41.0, 40.0, -1.0), (-math.inf, 40.0, math.inf), (36.0, math.inf, None), (None, None, None),
    ):  # fmt: skip
        assert with_loss(Figures(sqnr_db=own), Figures(sqnr_db=quantized)).loss_db == loss


def test_a_limit_decides_only_the_dtypes_it_applies_to() -> None:
    numbers, counts = Figures(sqnr_db=1.0, cosine=1.0, max_abs=0.0), Figures(mismatch=0.0)
    assert is_decided(numbers, Limits(cosine=0.9))
    assert not is_decided(numbers, Limits(mismatch=0.0))
    assert not is_decided(numbers, Limits(steps=1.0, loss_db=1.0))
    assert is_decided(Figures(steps=0.0), Limits(steps=1.0))
    assert is_decided(counts, Limits(mismatch=0.0))
    assert not is_decided(counts, Limits(sqnr_db=20.0, cosine=0.9, max_abs=0.1))


@pytest.mark.parametrize(
    ("references", "problem"),
    [
        ([np.zeros((2, 2), np.float32)], "is zero everywhere"),
        ([[-0.0] * 3], "is zero everywhere"),
        ([np.full((2, 2), 0.5, np.float32)], "is the constant 0.5"),
        ([[1.0, math.nan]], "has NaN in sample 0"),
        ([[math.inf, math.inf]], "is the constant inf"),
        ([[True, True]], "is the constant True"),
        ([np.zeros((0, 3))], "is empty"),
        ([[0]], "is zero everywhere"),
        ([[3]], None),
        ([2.5], None),
        ([[1.0, math.inf]], None),
        ([[1.0, 1.0, 1.0001]], None),
        ([[0], [1], [0]], None),
        ([[0], [0], [0]], "is zero everywhere in all 3 samples"),
        ([[3], [3]], None),
        ([[0.0, 0.0], [0.5, 0.0]], None),
        ([[0.5, 0.5], [0.25, 0.25]], None),
        ([[0.5, 0.5], [0.5, 0.5]], "is the constant 0.5 in all 2 samples"),
        ([[1.0, 2.0], [math.nan, 1.0]], "has NaN in sample 1"),
        ([[], []], "is empty"),
        ([[True], [False]], None),
    ],
)
def test_the_signal_of_a_reference_is_that_of_all_samples(references: list[Any], problem: str | None) -> None:
    assert signal_problem([np.array(one) for one in references]) == problem


def test_equal_elements_include_nan_and_are_rounded_to_half_precision() -> None:
    third = np.array([1 / 3, math.nan, -math.inf, 0.1], np.float32)
    in_half = third.astype(np.float16).astype(np.float32)
    assert is_equal(third, third)
    assert not is_equal(in_half, third)
    assert is_equal(in_half, third, half=True)
    # As the simulator of QNN 2.51 gives torch.ones.
    almost = np.nextafter(np.ones(2, np.float32), 0, dtype=np.float32)
    assert is_equal(almost, np.ones(2, np.float32), half=True)
    assert not is_equal(np.nextafter(in_half.astype(np.float16), np.float16(0)), in_half.astype(np.float16), half=True)
    assert not is_equal(np.array([1, 2]), np.array([1, 3]), half=True)


LOGITS = np.array([[0.1, 2.0, -1.0], [3.0, 0.0, 1.0], [0.0, 0.5, 4.0], [1.0, 0.9, 0.8]], np.float32)


def test_top1_counts_positions_with_the_same_greatest_element() -> None:
    other = LOGITS * 0.5
    assert top1_agreement(other, LOGITS) == 1.0
    other[3] = 0.0, 1.0, 0.0
    assert top1_agreement(other, LOGITS) == 0.75
    assert top1_agreement(other.reshape(2, 2, 3), LOGITS.reshape(2, 2, 3)) == 0.75
    other[0] = np.nan
    assert top1_agreement(other, LOGITS) == 0.5


def test_psnr_is_against_the_range_of_the_reference() -> None:
    image = np.linspace(0.0, 1.0, 256, dtype=np.float32)
    assert psnr_db(image + np.float32(0.01), image) == pytest.approx(40.0, abs=0.01)
    assert psnr_db(image, image) == math.inf
    assert psnr_db(np.full_like(image, np.nan), image) == -math.inf


def test_a_metric_decides_where_it_has_a_limit() -> None:
    wrong = LOGITS[:, ::-1].copy()
    measured, problem = measure(Metric("top1"), [(LOGITS, LOGITS), (wrong, LOGITS)])
    assert (measured.metric, measured.unit, problem) == ("top1[0]", "1", "")
    assert measured.samples[0] == 1.0
    share = sum(measured.samples) / 2
    assert measure(Metric("tokens", output=2, least=1.0), [(LOGITS, LOGITS), (wrong, LOGITS)]) == (
        type(measured)("tokens[2]", "1", measured.direction, measured.samples),
        f"tokens {share:.4g} < 1",
    )
    _, problem = measure(Metric("psnr_db", least=30.0), [(LOGITS + 1, LOGITS)])
    assert problem.startswith("psnr ")
    assert problem.endswith(" < 30 dB")


# Executions of an attempt with other outputs than the last execution, which is compared with the references.


def differ(
    execution: Execution, sample: int, count: int, first: tuple[int, ...] = (), iterations: int = 2, warm_up: int = 1
) -> None:
    """Make `count` of the executions of a sample differ."""
    execution.report["inferences"][sample] |= {
        "warm_up_ns": [9_000] * warm_up,
        "iterations_ns": [3_000] * iterations,
        "differing": {"count": count, "executions": list(first or range(count))},
    }


def ending(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.verdict.value, attempt.stage.value, attempt.cause.value


WRONG = ("failed", "numerics", "numerics")
PASSED = ("passed", "done", "")


@pytest.fixture
def alone(make_execution: Callable[..., Execution]) -> Execution:
    """Execution with a single sample."""
    return make_execution(samples=1)


def test_one_execution_that_differs_fails_the_job_although_the_last_is_right(alone: Execution) -> None:
    differ(alone, 0, 1, (7,), iterations=20)
    attempt = alone.judge()
    assert ending(attempt) == WRONG
    assert attempt.reason == "execution 8 of 21 (the first is warm-up) gave other outputs than the last"
    # The measurements are recorded all the same.
    assert {"latency", "sqnr_fp32[0]"} <= {one.metric for one in attempt.measurements}
    assert attempt.comparisons[0].violations == ()
    alone.known_issues = (KnownIssue(reason="reads uninitialized memory"),)
    assert alone.judge().known_issue == "reads uninitialized memory"
    # Outputs that break a limit are the reason, and the executions a note.
    alone.scale_output(-1)
    broken = alone.judge()
    assert (ending(broken), "sqnr" in broken.reason, broken.notes) == (WRONG, True, (attempt.reason,))


def test_the_reason_names_the_first_sample_and_is_bounded(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(samples=4)
    for sample in (1, 3):
        differ(execution, sample, 1, (1,), iterations=4)
    for how, reason in (
        ({"count": 1, "first": (1,), "iterations": 4}, "execution 2 of 5 (the first is warm-up)"),
        ({"count": 2, "iterations": 3, "warm_up": 0}, "executions 1, 2 of 3"),
        ({"count": 40, "warm_up": 50},
         "executions 1, 2, 3, 4, 5, 6, 7, 8 and 32 more of 52 (the first 50 are warm-up)"),
    ):  # fmt: skip
        differ(execution, 1, **how)
        assert execution.judge().reason == f"sample 1: {reason} gave other outputs than the last; so in 2 of 4 samples"


def test_fewer_executions_than_asked_for_are_no_result(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(samples=4)
    execution.raw["executions"] = 3
    assert ending(execution.judge()) == PASSED
    execution.report["inferences"][2] |= {"iterations_ns": [3_000]}
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull", "")
    assert attempt.reason == "result.json is refused: inferences[2] has 2 executions, 3 were asked for"
    assert attempt.measurements == ()


@pytest.mark.parametrize(
    ("manifest", "deterministic", "why"),
    [
        ({}, False, "the case is declared as not deterministic"),
        ({"stateful": True}, None, "the module changes buffers of its own"),
        ({"references": ()}, None, "there is no reference for them"),
    ],
)
def test_executions_may_differ_unless_the_case_is_deterministic(
    alone: Execution, manifest: dict[str, Any], deterministic: bool | None, why: str
) -> None:
    differ(alone, 0, 1)
    alone.replace_manifest(**manifest)
    alone.deterministic = deterministic
    attempt = alone.judge()
    assert ending(attempt) == PASSED
    note = f"execution 1 of 3 (the first is warm-up) gave other outputs than the last: {why}"
    assert note in attempt.notes
    alone.deterministic = True
    assert ending(alone.judge()) == WRONG


def test_results_of_a_runner_without_the_comparison_are_infra(execution: Execution) -> None:
    inferences: list[dict[str, Any]] = execution.report["inferences"]
    del inferences[1]["differing"]
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "execute", "")
    assert "does not compare the outputs of all executions: build it again from native_runner/" in attempt.reason
    # An older runner that takes part on purpose is measured.
    assert ending(execution.judge(any_runner=True)) == PASSED
    assert execution.judge(any_runner=True).notes == ()
    assert attempt.cause is Cause.NONE


# A figure is declared once: the recipe of docs/developers/recipes.md, from the manifest to the report.


MANIFEST = """
[suite]
name = "signs"
description = "one case, and a limit on a figure of our own"
precisions = ["fp32"]

[suite.tolerance.fp32.fp32]
sqnr_db = 100.0
sign_flips = -1.0

[case.add]
module = "torch.nn:Linear"
args = [4, 4]
inputs = [{ shape = [1, 4] }]
"""
JOB = "signs/add[SM8650-xnnpack-fp32]"


@pytest.mark.parametrize(
    ("name", "value", "limit", "text", "excess"),
    [
        ("sqnr_db", 14.0, 20.0, "sqnr 14 dB < 20 dB", 1.9953),
        ("loss_db", 9.0, 3.0, "loss 9 dB > 3 dB", 1.9953),
        ("cosine", 0.96, 0.99, "cosine 0.96 < 0.99", 2.0),
        ("steps", 6.0, 2.0, "steps 6 > 2", 3.0),
    ],
)
def test_direction_and_unit_say_how_a_limit_is_broken(
    name: str, value: float, limit: float, text: str, excess: float
) -> None:
    figure = FIGURES[name]
    assert figure.breaks(value, limit)
    assert not figure.breaks(limit, limit)
    assert figure.breaks(float("nan"), limit)
    assert figure.broken_text(value, limit) == text
    assert figure.excess(value, limit) == pytest.approx(excess, rel=1e-3)
    assert figure.worst([value, limit]) == value
    assert (figure.direction is Direction.HIGHER) == ("<" in text)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> FarmCopy:
    copy = FarmCopy.make(tmp_path_factory.mktemp("recipe"), farm_cache)
    function, entry = recipe_code("developers/recipes.md", "Adding a figure")
    copy.insert("farm/suites/figures.py", "_LOWER, _HIGHER = ", function)
    copy.insert("farm/suites/figures.py", '        Figure("top1"', f"{entry.rstrip()},\n")
    suite = copy.folder / "signs"
    suite.mkdir()
    (suite / "suite.toml").write_text(MANIFEST, encoding="utf-8")
    return copy


@pytest.mark.whole
def test_a_new_figure_is_judged_stored_and_shown(farm: FarmCopy) -> None:
    suite = str(farm.folder / "signs")
    ran = farm.farm("run", "--soc", "SM8650", "--suite", suite, "--backend", "xnnpack", "--virtual", "1", "--json")
    assert ran.returncode == 1, ran.stderr
    (attempt,) = json.loads(ran.stdout)["jobs"][0]["attempts"]
    assert attempt["reason"] == "output 0 against fp32: sign_flips 0 > -1"
    assert attempt["comparisons"][0]["violations"] == ["sign_flips 0 > -1"]
    measured = {one["metric"]: one for one in attempt["measurements"]}["sign_flips_fp32[0]"]
    assert (measured["unit"], measured["direction"], measured["samples"]) == ("1", "lower", [0.0])

    history = farm.farm("history", JOB, "--metric", "sign_flips_fp32[0]", "--json")
    assert "sign_flips_fp32[0]" in history.stdout, history.stderr
    page = farm.folder / "report.html"
    assert farm.farm("report", "latest", "--html", str(page)).returncode in (0, 1)
    assert "sign_flips_fp32[0]" in page.read_text(encoding="utf-8")
    assert "sign_flips 0 > -1" in farm.farm("report", "latest").stdout


@pytest.mark.whole
def test_an_unknown_figure_is_refused(farm: FarmCopy) -> None:
    manifest = farm.folder / "wrong" / "suite.toml"
    manifest.parent.mkdir()
    text = MANIFEST.replace('"signs"', '"wrong"').replace("sign_flips", "sign_flops")
    manifest.write_text(text, encoding="utf-8")
    refused = farm.farm("run", "--soc", "SM8650", "--suite", str(manifest), "--backend", "xnnpack", "--virtual", "1")
    assert refused.returncode == 2
    assert re.search("unknown key 'sign_flops': did you mean 'sign_flips'", refused.stderr)


# Outputs by name, and writes of a module to its inputs and buffers: verdicts and texts for readers.


@pytest.fixture
def writing(make_execution: Callable[..., Execution]) -> Execution:
    """An execution of a program that gives a written input, then two outputs with names."""
    execution = make_execution(dtypes=("float32",) * 3)
    first, *others = execution.manifest.outputs
    replace = msgspec.structs.replace
    named = (replace(one, name=name) for one, name in zip(others, ("aux", "[1].0"), strict=True))
    execution.replace_manifest(outputs=(replace(first, name="x", written=True), *named), writes=("input x",))
    return execution


def test_a_written_input_is_compared_by_name_and_counts_after_the_outputs(writing: Execution) -> None:
    attempt = writing.judge()
    assert attempt.verdict is Verdict.PASSED
    fp32 = [(one.output, one.name, one.label) for one in attempt.comparisons if one.reference == "fp32"]
    assert fp32 == [
        (2, "input x as written", "input x as written"),
        (0, "aux", "output aux"),
        (1, "[1].0", "output [1].0"),
    ]
    assert {one.metric for one in attempt.measurements if one.metric.startswith("sqnr_fp32")} == {
        "sqnr_fp32[0]", "sqnr_fp32[1]", "sqnr_fp32[2]",
    }  # fmt: skip
    assert "writes to its input x" in attempt.notes


def test_a_program_without_the_write_fails_whatever_its_outputs(execution: Execution) -> None:
    execution.replace_manifest(lost_writes=("input x", "buffer total"))
    attempt = execution.judge()
    assert (attempt.verdict, attempt.stage, attempt.cause) == (Verdict.FAILED, Stage.BUILD, Cause.COMPILE)
    assert attempt.reason == (
        "the program does not write to its input x and its buffer total, as the module does: "
        "return the new value instead"
    )
    execution.scale_output(-1)
    assert "; output 0 against" in execution.judge().reason
    (execution.folder / "output_0_0.raw").unlink()
    assert execution.judge().verdict is Verdict.INFRA, "trouble of the device comes before a lost write"


def test_a_program_with_a_state_is_executed_once_per_sample(execution: Execution) -> None:
    asked = RunnerOptions(iterations=5, warm_up=2)
    assert options_for(execution.manifest, asked) == asked
    once = options_for(msgspec.structs.replace(execution.manifest, stateful=True), asked)
    assert (once.iterations, once.warm_up) == (1, 0)
