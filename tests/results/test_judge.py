from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from farm.builds.bundles.bundle import Bundle, Constant, Manifest, TensorSpec
from farm.devices.health import Event, Health, HealthMark, next_health
from farm.policy.retries import Classification, classify, tried
from farm.results.attempt import Attempt, Cause, Direction, Stage, Verdict
from farm.results.judge import build_failure, not_simulated
from farm.suites.suite import Expectation, KnownIssue, Limits, Metric, Tolerance

from .conftest import LOAD_BLOCK, SHAPE, write_etdump

if TYPE_CHECKING:
    from .conftest import Execution

ISSUE = KnownIssue(reason="HTP rounds half to even")


def is_the_codes_at_once(attempt: Attempt) -> bool:
    """Return whether a failure counts against the code without a try on another device."""
    decision = classify([tried(attempt)], others=5)
    return decision.classification is Classification.CODE and not decision.repeat


def ending(attempt: Attempt) -> tuple[str, str]:
    return attempt.verdict.value, attempt.stage.value


def measured(attempt: Attempt) -> dict[str, tuple[float, ...]]:
    return {measurement.metric: measurement.samples for measurement in attempt.measurements}


def test_equal_outputs_pass_with_everything_measured(execution: Execution, etdump: Callable[..., bytes]) -> None:
    execution.folder.joinpath("etdump.etdp").write_bytes(etdump([9, 9], [1, 2], [3, 4], [9], [5], [6, 7]))
    attempt = execution.judge()
    assert (ending(attempt), attempt.reason, attempt.notes, attempt.log) == (("passed", "done"), "", (), "")
    assert (attempt.job_id, attempt.device, attempt.seconds) == ("suite/case[SM8650-htp-8a8w]", "emulator-5554", 1.0)
    assert attempt.bundle_key == execution.manifest.key
    assert [(c.output, c.reference, c.sqnr_db, c.cosine, c.max_abs) for c in attempt.comparisons] == [
        (0, "fp32", math.inf, 1.0, 0.0),
        (0, "quantized", math.inf, 1.0, 0.0),
    ]
    rows = {m.metric: (m.unit, m.direction, m.exact, m.samples) for m in attempt.measurements}
    lower, higher, none = Direction.LOWER, Direction.HIGHER, Direction.NONE
    assert rows == {
        "latency": ("ns", lower, False, (3_000_000.0, 4_000_000.0, 3_000_001.0, 4_000_000.0)),
        "model_load_time": ("ns", lower, False, (3_500_000.0,)),
        "verification_time": ("ns", lower, False, (60_000.0,)),
        "htp_cycles": ("cycles", lower, False, (3.0, 7.0, 5.0, 13.0)),
        "sqnr_fp32[0]": ("dB", higher, False, (math.inf, math.inf)),
        "sqnr_quantized[0]": ("dB", higher, False, (math.inf, math.inf)),
        "cosine_fp32[0]": ("1", higher, False, (1.0, 1.0)),
        "pte_size": ("bytes", lower, True, (62976.0,)),
        "partitions": ("count", none, True, (1.0,)),
        "delegated_ops": ("count", none, True, (7.0,)),
        "fallback_ops": ("count", lower, True, (0.0,)),
    }


@pytest.mark.parametrize(
    ("says", "metrics"),
    [
        ({}, {"model_load_time", "verification_time"}),
        ({"warm": True}, {"warm_model_load_time", "verification_time"}),
        ({"verification_ns": None}, {"load_time"}),
        ({"verification_ns": None, "warm": True}, {"warm_load_time"}),
    ],
)
def test_a_load_with_the_verification_in_it_is_another_series(
    execution: Execution, says: dict[str, object], metrics: set[str]
) -> None:
    execution.report |= says
    assert {name for name in measured(execution.judge()) if "load" in name or "verification" in name} == metrics


def test_noise_within_the_limits_passes_and_is_measured_per_sample(execution: Execution) -> None:
    for sample, noise in ((0, 1.01), (1, 1.001)):
        execution.set_output(sample, 0, execution.output(sample, 0) * np.float32(noise))
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert measured(attempt)["sqnr_quantized[0]"] == pytest.approx((40.0, 60.0), abs=0.01)
    assert measured(attempt)["sqnr_fp32[0]"] == pytest.approx((40.0, 60.0), abs=0.01)
    assert attempt.comparisons[0].sqnr_db == pytest.approx(40.0, abs=0.01)


def test_an_attempt_can_be_stored_as_it_is(execution: Execution) -> None:
    execution.raw["stderr"] = "a\ud800\x1b[0m\n"
    attempt = execution.judge()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(attempt), type=Attempt)
    assert decoded == attempt
    assert attempt.log == "a\\ud800\n"


# The farm and the device.


@pytest.mark.parametrize("stage", ["push", "execute", "pull"])
def test_an_error_of_the_device_is_infra_whatever_was_left(execution: Execution, stage: str) -> None:
    execution.fail("execute", "the code is wrong")
    execution.raw |= {
        "error": "emulator-5554: device offline",
        "error_stage": stage,
        "timed_out": True,
        "exit_code": 139,
    }
    attempt = execution.judge()
    assert ending(attempt) == ("infra", stage)
    assert attempt.reason == "emulator-5554: device offline"
    assert attempt.measurements == ()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("load", ("failed", "load")),
        ("execute", ("failed", "execute")),
        ("flags", ("infra", "load")),
        ("options", ("infra", "load")),
        ("inputs", ("infra", "execute")),
        ("outputs", ("infra", "execute")),
        ("etdump", ("infra", "execute")),
    ],
)
def test_an_error_of_the_runner_is_classified_by_its_stage(
    execution: Execution, stage: str, expected: tuple[str, str]
) -> None:
    execution.fail(stage, "no kernel for\naten::fmod.out", code=20, line=1)
    attempt = execution.judge()
    assert ending(attempt) == expected
    assert attempt.reason == f"{stage}: no kernel for aten::fmod.out"


def test_an_error_of_the_runner_counts_more_than_how_it_was_ended(execution: Execution) -> None:
    execution.fail("execute", "no kernel")
    execution.raw |= {"timed_out": True, "exit_code": None}
    assert execution.judge().reason == "execute: no kernel"


@pytest.mark.parametrize(
    ("raw", "expected", "reason"),
    [
        ({"exit_code": 139}, ("failed", "execute"), r"signal 11 \(SIGSEGV\): it touched"),
        ({"exit_code": -11}, ("failed", "execute"), r"signal 11 \(SIGSEGV\)"),
        ({"exit_code": 134}, ("failed", "execute"), r"signal 6 \(SIGABRT\)"),
        ({"exit_code": 137}, ("failed", "execute"), r"signal 9 \(SIGKILL\): something killed it, perhaps"),
        ({"exit_code": 128 + 60}, ("failed", "execute"), r"signal 60 \(a real-time signal\)"),
        ({"exit_code": 4}, ("failed", "execute"), "ended with exit code 4; it left no result.json"),
        ({"exit_code": 255}, ("failed", "execute"), "ended with exit code 255"),
        (
            {"exit_code": 127, "stderr": "sh: farm_runner: not found"},
            ("infra", "execute"),
            "did not start: .*not found",
        ),
        ({"exit_code": 126}, ("infra", "execute"), "did not start: exit code 126"),
        (
            {
                "exit_code": 134,
                "stderr": 'log\nCANNOT LINK EXECUTABLE "farm_runner": library "libQnnHtp.so" not found\n',
            },
            ("infra", "execute"),
            "did not start: CANNOT LINK EXECUTABLE .*libQnnHtp.so",
        ),
        ({"exit_code": None}, ("infra", "execute"), "never reported how the runner ended"),
        ({"exit_code": 0}, ("infra", "pull"), "no result.json"),
        ({"exit_code": None, "timed_out": True, "run_seconds": 300.2}, ("failed", "execute"), "within 300 s"),
        ({"exit_code": 137, "timed_out": True}, ("failed", "execute"), "did not end within"),
    ],
)
def test_endings_without_a_report(
    execution: Execution, raw: dict[str, Any], expected: tuple[str, str], reason: str
) -> None:
    execution.raw |= raw
    attempt = execution.judge(write_report=False)
    assert ending(attempt) == expected
    assert msgspec.json.encode(attempt)
    assert re.search(reason, attempt.reason)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(139, "the runner ended with signal 11"), (3, "the runner ended with exit code 3; it had reported success")],
)
def test_success_is_not_believed_of_a_runner_that_then_crashed(execution: Execution, code: int, reason: str) -> None:
    execution.raw["exit_code"] = code
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "execute")
    assert attempt.reason.startswith(reason)


def test_a_report_that_is_not_believed_is_infra_and_says_where(execution: Execution) -> None:
    execution.report["inferences"][1]["iterations_ns"][0] = -5
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull")
    assert "result.json is refused" in attempt.reason
    assert "iterations_ns" in attempt.reason
    assert attempt.measurements == ()


def test_more_work_than_there_was_time_is_refused(execution: Execution) -> None:
    execution.report["inferences"][0]["iterations_ns"] = [2 * 10**9]
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull")
    assert "claims 2.0 s of work, and the runner ran for 0.5 s" in attempt.reason


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        ({"exit_code": 139}, Cause.CRASH),
        ({"exit_code": 3}, Cause.CRASH),
        ({"exit_code": 142}, Cause.HANG),
        ({"exit_code": None, "timed_out": True}, Cause.HANG),
        ({"exit_code": None}, Cause.CONNECTION),
        ({"exit_code": 127, "stderr": "sh: farm_runner: not found"}, Cause.NONE),
        ({"exit_code": 0}, Cause.NONE),
        ({"error": "offline", "error_stage": "push", "error_cause": "gone"}, Cause.GONE),
        ({"error": "full", "error_stage": "push", "error_cause": "space"}, Cause.SPACE),
        ({"error": "odd", "error_stage": "pull"}, Cause.NONE),
    ],
)
def test_an_ending_without_a_report_has_a_cause(execution: Execution, raw: dict[str, Any], cause: Cause) -> None:
    execution.raw |= raw
    assert execution.judge(write_report=False).cause is cause


@pytest.mark.parametrize(
    ("stage", "exit_code", "message", "cause"),
    [
        ("load", 4, "no kernel", Cause.REFUSED),
        ("execute", 6, "no kernel", Cause.REFUSED),
        ("execute", 9, "not finished after 300000 ms", Cause.HANG),
        ("load", 9, "not finished after 300000 ms", Cause.HANG),
        ("execute", 11, "ended by SIGTERM", Cause.NONE),
        ("outputs", 7, "output_0_0.raw: No space left on device", Cause.SPACE),
        ("inputs", 5, "input_0_0.raw has 3 bytes", Cause.NONE),
    ],
)
def test_an_error_of_the_runner_has_a_cause(
    execution: Execution, stage: str, exit_code: int, message: str, cause: Cause
) -> None:
    execution.fail(stage, message)
    execution.report["exit_code"] = exit_code
    assert execution.judge().cause is cause


def test_what_outputs_and_builds_end_with_has_a_cause(execution: Execution) -> None:
    assert execution.judge().cause is Cause.NONE
    execution.set_output(0, 0, execution.output(0, 0) * np.float32(2))
    assert execution.judge().cause is Cause.NUMERICS
    assert build_failure(execution.job, "it does not lower").cause is Cause.COMPILE
    assert build_failure(execution.job, "the builder was killed", infra=True).cause is Cause.BUILDER


# Outputs.


def test_too_few_inferences_are_infra(execution: Execution) -> None:
    del execution.report["inferences"][1]
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "execute")
    assert attempt.reason == "the runner ran 1 of 2 inferences"


def test_a_missing_output_is_infra(execution: Execution) -> None:
    (execution.folder / "output_1_0.raw").unlink()
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull")
    assert attempt.reason == "output_1_0.raw is not there although the runner reported success"


@pytest.mark.parametrize("size", [0, 95, 97, 10**6])
def test_an_output_of_another_size_is_infra(execution: Execution, size: int) -> None:
    (execution.folder / "output_1_0.raw").write_bytes(b"\0" * size)
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull")
    assert attempt.reason == f"output_1_0.raw has {size} bytes, the runner wrote 96"


@pytest.mark.parametrize("references", [("fp32", "quantized"), ()])
@pytest.mark.parametrize("nbytes", [0, 48])
def test_a_report_whose_bytes_contradict_its_shape_is_refused(
    execution: Execution, nbytes: int, references: tuple[str, ...]
) -> None:
    execution.replace_manifest(references=references)
    execution.report["outputs"][0]["nbytes"] = nbytes
    for sample in range(2):
        (execution.folder / f"output_{sample}_0.raw").write_bytes(b"\0" * nbytes)
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "pull")
    assert attempt.reason.startswith("result.json is refused: output 0 is float32[2, 3, 4] with")


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "the model gives 0 outputs, the reference 1"),
        (
            [{"shape": [24], "dtype": "float32", "nbytes": 96}],
            "output 0 is float32[24], the reference is float32[2, 3, 4]",
        ),
        ([{"shape": list(SHAPE), "dtype": "int32", "nbytes": 96}], "output 0 is int32[2, 3, 4], the reference is"),
    ],
)
def test_a_model_with_other_outputs_fails(execution: Execution, outputs: list[Any], reason: str) -> None:
    execution.report["outputs"] = outputs
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert attempt.reason.startswith(reason)
    assert "latency" in measured(attempt)


@pytest.mark.parametrize("kind", ["fp32", "quantized"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.0, "is zero everywhere in all 2 samples"),
        (2.5, "is the constant 2.5 in all 2 samples"),
        (math.nan, "has NaN in sample 0"),
    ],
)
def test_a_reference_without_signal_fails_even_when_all_agrees(
    execution: Execution, kind: str, value: float, problem: str
) -> None:
    flat = np.full(SHAPE, value, np.float32)
    for sample in range(execution.samples):
        execution.set_reference(sample, 0, flat, kind)
        execution.set_output(sample, 0, flat)
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert attempt.reason.startswith(f"the {kind} reference of output 0 {problem}, and depends on the inputs")
    assert is_the_codes_at_once(attempt), "it is the same on every device"


def test_an_output_without_signal_in_one_sample_is_judged_by_the_others(execution: Execution) -> None:
    flat = np.zeros(SHAPE, np.float32)
    execution.set_reference(1, 0, flat)
    execution.set_output(1, 0, flat)
    assert ending(execution.judge()) == ("passed", "done")
    execution.set_output(1, 0, flat + np.float32(0.1))
    attempt = execution.judge()
    assert (ending(attempt), attempt.reason[:16]) == (("failed", "numerics"), "output 0 against")


def test_outputs_beside_one_without_signal_are_judged(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(dtypes=("float32", "float32"))
    for sample in range(2):
        execution.set_reference(sample, 1, np.zeros(SHAPE, np.float32))
        execution.set_output(sample, 1, np.zeros(SHAPE, np.float32))
    dead = execution.judge()
    assert (ending(dead), dead.cause) == (("failed", "numerics"), Cause.NONE)
    assert "output 1 is zero everywhere" in dead.reason
    assert {(one.output, one.reference) for one in dead.comparisons} == {(0, "fp32"), (0, "quantized")}
    assert "sqnr_fp32[0]" in measured(dead)
    execution.set_output(0, 0, execution.output(0, 0) * np.float32(2))
    wrong = execution.judge()
    assert (ending(wrong), wrong.cause) == (("failed", "numerics"), Cause.NUMERICS)
    assert re.match(r"output 0 against \w+: .* \(and \d more\)$", wrong.reason)


def constant_execution(make_execution: Callable[..., Execution], value: Any, constant: str, dtype: str) -> Execution:
    """Return an execution with a second output that the graph makes constant."""
    execution = make_execution(dtypes=("float32", dtype))
    live, other = execution.manifest.outputs
    other = msgspec.structs.replace(other, constant=Constant(constant))
    execution.replace_manifest(outputs=(live, other))
    for sample in range(execution.samples):
        execution.set_reference(sample, 1, np.full(SHAPE, value, dtype))
        execution.set_output(sample, 1, np.full(SHAPE, value, dtype))
    return execution


@pytest.mark.parametrize(
    ("value", "dtype"), [(8.0, "float32"), (0.0, "float32"), (math.nan, "float32"), (True, "bool"), (0, "int64")]
)
def test_a_constant_of_the_graph_is_compared_exactly(
    make_execution: Callable[..., Execution], value: Any, dtype: str
) -> None:
    execution = constant_execution(make_execution, value, "literal", dtype)
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done"), attempt.reason
    assert "constant by the graph, compared exactly: output 1" in attempt.notes
    wrong = np.full(SHAPE, value, dtype)
    wrong.flat[3] = 1 - wrong.flat[3] if dtype == "bool" else wrong.flat[3] + 1 if value == value else 1.0  # noqa: PLR0124 - NaN
    execution.set_output(1, 1, wrong)
    attempt = execution.judge()
    assert (ending(attempt), attempt.cause) == (("failed", "numerics"), Cause.NUMERICS)
    assert "output 1" in attempt.reason


def test_a_constant_within_the_limits_is_not_equal(make_execution: Callable[..., Execution]) -> None:
    execution = constant_execution(make_execution, 8.0, "literal", "float32")
    execution.set_output(1, 1, np.full(SHAPE, 8.001, np.float32))
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    reason = "output 1 is constant by the graph: max abs 0.001 from the quantized reference in sample 1"
    assert attempt.reason == reason
    [comparison, _] = [one for one in attempt.comparisons if one.output == 1]
    assert comparison.sqnr_db == pytest.approx(78, abs=1)


def test_constants_that_the_backend_computes_have_the_limits_of_the_case(
    make_execution: Callable[..., Execution],
) -> None:
    execution = constant_execution(make_execution, 8.0, "computed", "float32")
    assert "constant by the graph, compared exactly: output 1" in execution.judge().notes
    execution.set_output(1, 1, np.full(SHAPE, 8.01, np.float32))
    attempt = execution.judge()
    assert (ending(attempt), attempt.notes) == (("passed", "done"), ())
    execution.set_output(1, 1, np.full(SHAPE, 12.0, np.float32))
    assert execution.judge().reason.startswith("output 1 against")


def test_a_computed_zero_is_exactly_zero(make_execution: Callable[..., Execution]) -> None:
    execution = constant_execution(make_execution, 0.0, "computed", "float32")
    assert ending(execution.judge()) == ("passed", "done")
    execution.set_output(0, 1, np.full(SHAPE, 1e-6, np.float32))
    assert execution.judge().reason.startswith("output 1 against")


def test_constants_in_half_precision_are_rounded_to_it(make_execution: Callable[..., Execution]) -> None:
    execution = constant_execution(make_execution, 0.1, "literal", "float32")
    in_half = np.full(SHAPE, np.float16(0.1), np.float32)
    execution.set_output(0, 1, in_half)
    assert ending(execution.judge()) == ("failed", "numerics")
    execution.replace_manifest(precision="fp16a8w")
    assert ending(execution.judge()) == ("passed", "done")


def test_a_damaged_bundle_is_infra_at_build(execution: Execution) -> None:
    (execution.bundle_folder / "reference_fp32" / "output_0_0.raw").write_bytes(b"123")
    attempt = execution.judge()
    assert ending(attempt) == ("infra", "build")
    assert "farm setup cache prune" in attempt.reason


# Limits.


def test_one_bad_sample_of_one_output_fails_and_is_named(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(samples=3, dtypes=("float32", "float32"))
    execution.set_output(2, 1, execution.output(2, 1) * np.float32(1.5))
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert attempt.reason == "output 1 against quantized: sqnr 6.021 dB < 30 dB (and 1 more)"
    assert [c.violations for c in attempt.comparisons] == [
        (),
        (),
        ("sqnr 6.021 dB < 20 dB",),
        ("sqnr 6.021 dB < 30 dB",),
    ]
    assert measured(attempt)["cosine_fp32[1]"] == pytest.approx((1.0, 1.0, 1.0))
    assert "latency" in measured(attempt)


def test_either_reference_decides(execution: Execution) -> None:
    for sample in range(2):
        execution.set_reference(sample, 0, execution.output(sample, 0) * np.float32(1.5), "fp32")
    assert execution.judge().reason == "output 0 against fp32: sqnr 9.542 dB < 20 dB"


def test_nan_fails_with_its_own_text(execution: Execution) -> None:
    values = execution.output(0, 0)
    values[0, 0, :3] = np.nan
    execution.set_output(0, 0, values)
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert "3 elements are NaN where the reference has numbers" in attempt.reason
    assert not any("sqnr" in metric or "cosine" in metric for metric in measured(attempt))


def test_integers_are_decided_by_their_share(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(dtypes=("int64",))
    execution.tolerance = Tolerance(quantized=Limits(mismatch=0.1))
    assert ending(execution.judge()) == ("passed", "done")
    values = execution.output(1, 0)
    values.flat[:6] += 1
    execution.set_output(1, 0, values)
    attempt = execution.judge()
    assert attempt.reason == "output 0 against quantized: mismatch 0.25 > 0.1"
    assert [(c.sqnr_db, c.mismatch) for c in attempt.comparisons] == [(None, 0.25), (None, 0.25)]


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(fp32=Limits(mismatch=0.0))])
def test_nothing_passes_that_no_limit_decides(execution: Execution, tolerance: Tolerance) -> None:
    execution.tolerance = tolerance
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert attempt.reason == "no limit decides output 0 (float32): give the case a tolerance at 8a8w"
    assert is_the_codes_at_once(attempt), "no device could change it"


def test_every_output_needs_a_limit_of_its_kind(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(dtypes=("float32", "int64"))
    assert execution.judge().reason.startswith("no limit decides output 1 (int64)")
    execution.tolerance = Tolerance(fp32=Limits(cosine=0.9, mismatch=0.0))
    assert ending(execution.judge()) == ("passed", "done")


def test_a_difference_of_a_few_steps_decides_where_the_output_is_quantized(execution: Execution) -> None:
    execution.replace_manifest(outputs=(TensorSpec(SHAPE, "float32", step=0.125),))
    execution.tolerance = Tolerance(quantized=Limits(steps=2.0))
    values = execution.output(1, 0)
    values.flat[3] += 0.25
    execution.set_output(1, 0, values)
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert {comparison.steps for comparison in attempt.comparisons} == {2.0}
    values.flat[3] += 0.125
    execution.set_output(1, 0, values)
    assert execution.judge().reason == "output 0 against quantized: steps 3 > 2"


def test_what_the_backend_takes_has_to_be_what_the_case_expects(execution: Execution) -> None:
    execution.expect = (Expectation(partitions=2, socs=("SM8350",)), Expectation(partitions=1))
    assert ending(execution.judge()) == ("passed", "done")
    execution.replace_manifest(delegates={"QnnBackend": 2}, fallback_ops={"aten.add.Tensor": 3})
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "build")
    assert attempt.reason == (
        "2 partitions and aten.add.Tensor x3 left to the CPU, expected 1 partition and nothing left to the CPU"
    )
    execution.expect = (Expectation(partitions=2, fallback_ops={"aten.add.Tensor": 3}),)
    assert ending(execution.judge()) == ("passed", "done")


def test_a_case_may_still_expect_the_quantizing_that_comes_with_lpai(execution: Execution) -> None:
    quantizing = {f"quantized_decomposed.{name}_per_tensor.out": 1 for name in ("quantize", "dequantize")}
    execution.replace_manifest(backend="lpai", fallback_ops=quantizing)
    for named in ({}, quantizing):
        execution.expect = (Expectation(partitions=1, fallback_ops=named),)
        assert ending(execution.judge()) == ("passed", "done")


@pytest.mark.parametrize(
    ("manifest", "expected", "says"),
    [
        ({"spill_fill_bytes": 8192}, Expectation(least_spill_fill_bytes=8192), ""),
        ({"spill_fill_bytes": 0}, Expectation(least_spill_fill_bytes=1), "share has 0 bytes, expected 1 or more"),
        ({}, Expectation(least_spill_fill_bytes=1), "share has 0 bytes, expected 1 or more"),
        ({"pte_bytes": 500}, Expectation(most_pte_bytes=500), ""),
        ({"pte_bytes": 501}, Expectation(most_pte_bytes=500), "the program has 501 bytes, expected 500 or less"),
    ],
)
def test_what_a_feature_gives_has_to_be_what_the_case_expects(
    execution: Execution, manifest: dict[str, int], expected: Expectation, says: str
) -> None:
    execution.expect = (expected,)
    execution.replace_manifest(**manifest)
    attempt = execution.judge()
    assert ending(attempt) == (("failed", "build") if says else ("passed", "done"))
    assert attempt.reason.endswith(says)


def test_a_dump_has_as_many_layers_as_the_case_expects(execution: Execution) -> None:
    execution.expect = (Expectation(intermediate_outputs=2),)
    assert execution.judge().reason.startswith("the outputs of its layers cannot be read")
    kernel, layers = {"debug": True}, [{"debug": True, "delegate": "one"}, {"debug": True, "debug_id": 7}]
    for inside, says in (
        (layers, ""),
        (layers[:1], "1 outputs of layers were written, expected 2"),
        ([], "no outputs"),
        (None, "0 or 2 outputs of layers were written, expected 2"),
    ):
        first, second = (layers, []) if inside is None else (inside, inside)
        blocks = [LOAD_BLOCK, ("Execute", [kernel, *first]), ("Execute", [*second, *LOAD_BLOCK[1]])]
        (execution.folder / "etdump.etdp").write_bytes(write_etdump(blocks))
        attempt = execution.judge()
        assert (attempt.verdict, attempt.reason[: len(says)]) == ("failed" if says else "passed", says)


def test_what_no_simulator_executes_is_skipped_where_its_build_is_right(execution: Execution) -> None:
    execution.replace_manifest(features=("online_prepare",))
    attempt = not_simulated(execution.job, Bundle(execution.bundle_folder, execution.manifest))
    assert ending(attempt) == ("skipped", "build")
    assert attempt.reason == (
        "compiled, and not executed: its graph is made by the device when it is loaded; attach a SM8650"
    )
    assert (attempt.device, {one.metric for one in attempt.measurements}) == (
        "", {"pte_size", "partitions", "delegated_ops", "fallback_ops"},
    )  # fmt: skip
    execution.expect = (Expectation(partitions=2),)
    assert ending(not_simulated(execution.job, Bundle(execution.bundle_folder, execution.manifest))) == (
        "failed",
        "build",
    )


def test_what_needs_a_device_is_known_by_its_features_whatever_was_so_when_it_was_compiled(
    execution: Execution,
) -> None:
    older = msgspec.json.encode({**msgspec.to_builtins(execution.manifest), "needs_device": "no simulator had it"})
    assert not msgspec.json.decode(older, type=Manifest).needs_device
    execution.replace_manifest(features=("saver", "shared_buffer"))
    assert not execution.manifest.needs_device
    execution.replace_manifest(features=("saver", "use_weight_sharing"))
    assert "share weights" in execution.manifest.needs_device


def test_a_metric_of_the_case_is_measured_and_can_decide(execution: Execution) -> None:
    execution.metrics = (Metric("top1"),)
    assert measured(execution.judge())["top1[0]"] == (1.0, 1.0)
    execution.metrics = (Metric("top1", least=1.0),)
    execution.tolerance = Tolerance(fp32=Limits(sqnr_db=-300.0))
    execution.set_output(0, 0, -execution.output(0, 0))
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert attempt.reason == "output 0 against fp32: top1 0.5 < 1"
    execution.metrics = (Metric("top1", output=3),)
    assert "output 3" in execution.judge().reason


def test_without_any_reference_it_only_ran(execution: Execution) -> None:
    execution.replace_manifest(references=())
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert "it ran; nothing says what its outputs should be" in attempt.notes


def test_what_the_cpu_ran_alone_does_not_pass(execution: Execution) -> None:
    execution.replace_manifest(delegates={}, delegated_ops=0, fallback_ops={"aten.fmod.Scalar_out": 1})
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "build")
    assert attempt.reason == "nothing was delegated to the htp backend: the CPU ran it all"
    assert attempt.notes == ("left to the CPU: aten.fmod.Scalar_out x1",)
    assert len(attempt.comparisons) == 2


def test_a_fallback_is_noted(execution: Execution) -> None:
    execution.replace_manifest(fallback_ops={"b": 2, "a": 1})
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert attempt.notes == ("left to the CPU: a x1, b x2",)
    assert measured(attempt)["fallback_ops"] == (3.0,)


# Profiles.


@pytest.mark.parametrize(
    ("inferences", "note"),
    [
        ([[1]] * 5, "has 5 inferences where there were 6"),
        ([[1]] * 7, "has 7 inferences where there were 6"),
        ([[0]] * 6, "claims 0 to 0 cycles"),
        ([[2**63]] * 6, "claims 9223372036854775808"),
    ],
)
def test_cycles_that_do_not_fit_are_left_out_and_noted(
    execution: Execution, etdump: Callable[..., bytes], inferences: list[list[int]], note: str
) -> None:
    (execution.folder / "etdump.etdp").write_bytes(etdump(*inferences))
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert "htp_cycles" not in measured(attempt)
    assert note in attempt.notes[0]


def test_a_damaged_profile_is_noted_and_changes_no_verdict(execution: Execution) -> None:
    (execution.folder / "etdump.etdp").write_bytes(b"\x1b[31m" * 10)
    attempt = execution.judge()
    assert ending(attempt) == ("passed", "done")
    assert attempt.notes == ("no profile: etdump.etdp is refused: is not an ETDump: its identifier is missing",)


def test_no_cycles_where_none_were_asked_for_need_no_note(execution: Execution, etdump: Callable[..., bytes]) -> None:
    (execution.folder / "etdump.etdp").write_bytes(etdump(*[()] * 6))
    assert execution.judge().notes == ()


# Known issues.


def test_a_known_issue_covers_a_failure_and_stays_failed(execution: Execution) -> None:
    execution.known_issues = (ISSUE,)
    execution.set_output(0, 0, -execution.output(0, 0))
    attempt = execution.judge()
    assert (attempt.verdict, attempt.known_issue) == (Verdict.FAILED, ISSUE.reason)
    assert attempt.comparisons[0].violations


@pytest.mark.parametrize("simulated", [True, False])
def test_a_known_issue_of_a_stand_in_excuses_no_device(execution: Execution, simulated: bool) -> None:
    execution.known_issues = (msgspec.structs.replace(ISSUE, virtual=True),)
    execution.raw |= {"simulated": simulated}
    assert execution.judge().notes == (("known issue no longer shows: HTP rounds half to even",) if simulated else ())
    execution.set_output(0, 0, -execution.output(0, 0))
    attempt = execution.judge()
    assert (attempt.verdict, attempt.known_issue) == (Verdict.FAILED, ISSUE.reason if simulated else "")


def test_a_known_issue_that_no_longer_shows_is_noted(execution: Execution) -> None:
    execution.known_issues = (ISSUE,)
    attempt = execution.judge()
    assert (attempt.verdict, attempt.known_issue) == (Verdict.PASSED, "")
    assert attempt.notes == ("known issue no longer shows: HTP rounds half to even",)


def test_a_known_issue_that_comes_and_goes_is_not_said_to_be_gone(execution: Execution) -> None:
    execution.known_issues = (msgspec.structs.replace(ISSUE, intermittent=True),)
    assert execution.judge().notes == ("known issue does not show this time: HTP rounds half to even",)
    execution.set_output(0, 0, -execution.output(0, 0))
    assert execution.judge().known_issue == ISSUE.reason


def test_a_known_issue_that_has_expired_is_red_again_and_says_so(execution: Execution) -> None:
    past = msgspec.structs.replace(ISSUE, owner="ada", expires=date(2020, 1, 31))
    execution.known_issues = (past,)
    execution.set_output(0, 0, -execution.output(0, 0))
    attempt = execution.judge()
    assert (attempt.verdict, attempt.known_issue) == (Verdict.FAILED, "")
    assert "expired" in attempt.notes[0]
    assert "(ada, until 2020-01-31)" in attempt.notes[0]


def test_a_known_issue_says_who_sees_to_it_and_until_when(execution: Execution) -> None:
    execution.known_issues = (msgspec.structs.replace(ISSUE, owner="ada", expires=date(2999, 12, 31)),)
    execution.set_output(0, 0, -execution.output(0, 0))
    assert execution.judge().known_issue == f"{ISSUE.reason} (ada, until 2999-12-31)"


def test_a_known_issue_covers_no_fault_of_the_farm(execution: Execution) -> None:
    execution.known_issues = (ISSUE,)
    execution.raw |= {"error": "offline", "error_stage": "push"}
    attempt = execution.judge()
    assert (attempt.verdict, attempt.known_issue, attempt.notes) == (Verdict.INFRA, "", ())


def test_a_known_issue_elsewhere_does_not_cover(execution: Execution) -> None:
    execution.known_issues = (
        KnownIssue(reason="other", socs=("SM8750",)),
        KnownIssue(reason="x", precisions=("fp16",)),
    )
    execution.set_output(0, 0, -execution.output(0, 0))
    assert execution.judge().known_issue == ""


# Builds.


def test_a_compile_error_is_the_codes_and_a_dead_builder_the_farms(execution: Execution) -> None:
    failed = build_failure(execution.job, "unsupported op:\n  aten.fmod", "Traceback ...", "key", seconds=2.0)
    assert (failed.verdict, failed.stage, failed.reason) == (Verdict.FAILED, Stage.BUILD, "unsupported op: aten.fmod")
    assert (failed.log, failed.bundle_key, failed.seconds, failed.device) == ("Traceback ...", "key", 2.0, "")
    killed = build_failure(execution.job, "the builder was killed by signal 9", infra=True)
    assert (killed.verdict, killed.stage) == (Verdict.INFRA, Stage.BUILD)
    assert build_failure(execution.job, "").reason


def test_a_known_issue_covers_the_stage_that_it_is_about(execution: Execution) -> None:
    execution.known_issues = (ISSUE,)
    assert build_failure(execution.job, "x").known_issue == ""
    at_build = KnownIssue(reason="V68 cannot", stage="build")
    execution.known_issues = (at_build,)
    assert build_failure(execution.job, "x").known_issue == "V68 cannot"
    assert build_failure(execution.job, "x", infra=True).known_issue == ""
    execution.set_output(0, 0, -execution.output(0, 0))
    assert execution.judge().known_issue == ""


def test_on_the_cpu_nothing_has_to_be_delegated_and_the_fp32_module_decides(execution: Execution) -> None:
    execution.on_the_cpu()
    attempt = execution.judge()
    assert (ending(attempt), attempt.notes) == (("passed", "done"), ())
    assert [comparison.reference for comparison in attempt.comparisons] == ["fp32"]
    assert measured(attempt)["partitions"] == (0.0,)
    assert measured(attempt)["fallback_ops"] == (1.0,)
    assert "sqnr_quantized[0]" not in measured(attempt)


def test_on_the_cpu_no_more_than_rounding_is_forgiven(execution: Execution) -> None:
    execution.on_the_cpu()
    execution.set_output(0, 0, execution.output(0, 0) * np.float32(1 + 1e-6))
    assert execution.judge().verdict is Verdict.PASSED
    execution.set_output(0, 0, execution.output(0, 0) * np.float32(1 + 1e-4))
    attempt = execution.judge()
    assert ending(attempt) == ("failed", "numerics")
    assert re.fullmatch(r"output 0 against fp32: sqnr 79\.\d+ dB < 100 dB", attempt.reason)


HEAP = b"DSP:before_context_created (bytes), 928212\nDSP:after_context_freed (bytes), 930000\n"


def test_a_run_for_the_heap_has_its_numbers_and_no_others(execution: Execution) -> None:
    execution.raw["heap"] = True
    (execution.folder / "heap.txt").write_bytes(HEAP)
    attempt = execution.judge()
    assert attempt.verdict == "passed"
    rows = {row.metric: (row.samples, row.unit, row.exact) for row in attempt.measurements}
    assert rows == {
        "dsp_heap_before": ((928212.0,), "bytes", False),
        "dsp_heap_after": ((930000.0,), "bytes", False),
        "dsp_heap_difference": ((1788.0,), "bytes", False),
        "partitions": ((1.0,), "count", True),
    }
    assert "DSP heap: complete" in attempt.notes


def test_a_heap_that_a_crash_left_half_told_is_said_to_be(execution: Execution) -> None:
    execution.raw |= {"heap": True, "exit_code": 139}
    (execution.folder / "heap.txt").write_bytes(HEAP[:43])
    attempt = execution.judge(write_report=False)
    assert (attempt.verdict, attempt.stage) == ("failed", "execute")
    assert [row.metric for row in attempt.measurements] == ["dsp_heap_before", "partitions"]
    assert "DSP heap: partial: after_context_freed is missing" in attempt.notes


@pytest.mark.parametrize(
    ("data", "simulated", "verdict", "reason"),
    [
        (None, False, "skipped", "no DSP heap: ExecuTorch wrote no profile of it; it does on Android and QNX"),
        (None, True, "skipped", "no DSP heap: the simulator has no DSP"),
        (b"hello\n", False, "infra", "DSP heap: malformed: line 1 is 'hello', which says nothing of the DSP"),
    ],
)
def test_a_heap_that_was_not_measured_is_the_fault_of_neither_device_nor_code(
    execution: Execution, data: bytes | None, simulated: bool, verdict: str, reason: str
) -> None:
    execution.raw |= {"heap": True, "simulated": simulated}
    if data is not None:
        (execution.folder / "heap.txt").write_bytes(data)
    attempt = execution.judge()
    assert (attempt.verdict, attempt.cause, attempt.measurements) == (verdict, Cause.REQUEST, ())
    assert attempt.reason.startswith(reason)
    assert "\n" not in attempt.reason
    decision = classify([tried(attempt)], others=2)
    assert (decision.classification in {Classification.NONE, Classification.FARM}, decision.repeat) == (True, False)
    health, _ = next_health(Health.HEALTHY, [], HealthMark(Event.INFRA, str(attempt.cause), attempt.reason))
    assert health is Health.HEALTHY


@pytest.mark.parametrize("heap", [True, False])
def test_an_option_that_the_runtime_refuses_is_the_fault_of_neither_device_nor_code(
    execution: Execution, heap: bool
) -> None:
    execution.raw |= {"heap": heap, "exit_code": 3}
    message = "backend QnnBackend refuses the option qnn_runtime_heap_profiling_path=heap.txt: Error::Internal"
    execution.report |= {"ok": False, "exit_code": 3, "error": {"stage": "options", "message": message, "code": 1}}
    attempt = execution.judge()
    assert (attempt.verdict, attempt.cause) == ("skipped" if heap else "infra", Cause.REQUEST)
    assert message in attempt.reason


@pytest.mark.parametrize(
    ("data", "expected", "reason"),
    [
        (HEAP[:43], None, "DSP heap: partial: after_context_freed is missing"),
        (HEAP[43:], None, "DSP heap: partial: before_context_created is missing"),
        (HEAP.replace(b"930000", b"928211"), None, "DSP heap: 1 bytes less after the last context than before the"),
        (HEAP, Expectation(most_dsp_heap_bytes=929_999), "DSP heap: 930,000 bytes in use after the last context"),
        (HEAP, Expectation(most_dsp_heap_bytes=930_000), ""),
        (HEAP, Expectation(most_dsp_heap_kept_bytes=1_787), "DSP heap: 1,788 bytes kept, expected 1,787 or less"),
        (HEAP, Expectation(most_dsp_heap_kept_bytes=1_788), ""),
        (HEAP.replace(b"930000", b"928212"), Expectation(most_dsp_heap_kept_bytes=0), ""),
        (HEAP.replace(b"930000", b"10365396"), Expectation(most_dsp_heap_kept_bytes=4096), "DSP heap: 9,437,184 bytes"),
    ],
)
def test_a_heap_passes_with_both_numbers_within_the_limits_of_the_case(
    execution: Execution, data: bytes, expected: Expectation | None, reason: str
) -> None:
    execution.raw["heap"] = True
    execution.expect = (expected,) if expected is not None else ()
    (execution.folder / "heap.txt").write_bytes(data)
    attempt = execution.judge()
    assert (attempt.verdict, attempt.stage) == (("failed", "execute") if reason else ("passed", "done"))
    assert attempt.reason.startswith(reason)
    assert attempt.measurements, "the numbers that were found stay"


def test_several_processes_are_judged_by_their_median_and_all_of_them_are_kept(execution: Execution) -> None:
    execution.raw["heap"] = True
    execution.expect = (Expectation(most_dsp_heap_kept_bytes=2_000),)
    (execution.folder / "heap.txt").write_bytes(HEAP)
    for number, after in enumerate((b"929000", b"1928212"), 1):
        (execution.folder / f"process{number}").mkdir()
        (execution.folder / f"process{number}" / "heap.txt").write_bytes(HEAP.replace(b"930000", after))
    attempt = execution.judge()
    assert attempt.verdict == "passed"
    assert measured(attempt)["dsp_heap_difference"] == (788.0, 1_000_000.0, 1788.0)
    (execution.folder / "process2" / "heap.txt").unlink()
    assert execution.judge().verdict == "skipped", "an unmeasured process leaves the measurement incomplete"


@pytest.mark.parametrize(
    ("facts", "summary"),
    [
        ({}, "rounds"),
        ({"owner": "ada"}, "rounds (ada)"),
        ({"expires": date(2030, 1, 2)}, "rounds (until 2030-01-02)"),
        ({"owner": "ada", "expires": date(2030, 1, 2)}, "rounds (ada, until 2030-01-02)"),
    ],
)
def test_the_summary_of_a_known_issue_has_owner_and_last_day(facts: dict[str, Any], summary: str) -> None:
    assert KnownIssue(reason="rounds", **facts).summary == summary
