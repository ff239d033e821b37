from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from typing import Any

import msgspec
import numpy as np
import pytest

from farm.builds.bundles.bundle import Bundle, Constant, Manifest
from farm.devices.device import Event, Health, HealthMark, next_health
from farm.policy.retries import Classification, classify, tried
from farm.results.attempt import Attempt, Cause, Direction, Stage, Verdict
from farm.results.judge import build_failure, not_simulated
from farm.suites.suite import Expectation, KnownIssue, Limits, Metric, Tolerance

from .conftest import LOAD_BLOCK, SHAPE, Execution, measured, write_etdump

ISSUE = KnownIssue(reason="HTP rounds half to even")


def is_the_codes_at_once(attempt: Attempt) -> bool:
    """Return whether a failure counts against the code without a try on another device."""
    decision = classify([tried(attempt)], others=5)
    return decision.classification is Classification.CODE and not decision.repeat


def require(attempt: Attempt, verdict: str, stage: str, reason: str = "", cause: Cause | None = None) -> Attempt:
    """Assert verdict, stage and the begin of the reason, and return the attempt."""
    assert (attempt.verdict.value, attempt.stage.value) == (verdict, stage), attempt.reason
    assert attempt.reason.startswith(reason) if reason else verdict != "passed" or not attempt.reason
    assert cause is None or attempt.cause is cause
    return attempt


def require_passed(execution: Execution) -> Attempt:
    return require(execution.judge(), "passed", "done")


def require_wrong(execution: Execution, reason: str = "") -> Attempt:
    """Assert that the outputs break a limit."""
    return require(execution.judge(), "failed", "numerics", reason)


def test_equal_outputs_pass_with_everything_measured(execution: Execution, etdump: Callable[..., bytes]) -> None:
    execution.folder.joinpath("etdump.etdp").write_bytes(etdump([9, 9], [1, 2], [3, 4], [9], [5], [6, 7]))
    attempt = require_passed(execution)
    assert (attempt.notes, attempt.log, attempt.bundle_key) == ((), "", execution.manifest.key)
    assert (attempt.job_id, attempt.device, attempt.seconds) == ("suite/case[SM8650-htp-8a8w]", "emulator-5554", 1.0)
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


def test_an_attempt_can_be_stored_as_it_is(execution: Execution) -> None:
    execution.raw["stderr"] = "a\ud800\x1b[0m\n"
    attempt = execution.judge()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(attempt), type=Attempt) == attempt
    assert attempt.log == "a\\ud800\n"


# The farm and the device.


@pytest.mark.parametrize("stage", ["push", "execute", "pull"])
def test_an_error_of_the_device_is_infra_whatever_was_left(execution: Execution, stage: str) -> None:
    execution.fail("execute", "the code is wrong")
    error = "emulator-5554: device offline"
    execution.raw |= {"error": error, "error_stage": stage, "timed_out": True, "exit_code": 139}
    assert require(execution.judge(), "infra", stage, error).measurements == ()


@pytest.mark.parametrize(
    ("stage", "expected", "exit_code", "message", "cause"),
    [
        ("load", ("failed", "load"), 4, "no kernel for\naten::fmod.out", Cause.REFUSED),
        ("load", ("failed", "load"), 9, "not finished after 300000 ms", Cause.HANG),
        ("execute", ("failed", "execute"), 6, "no kernel", Cause.REFUSED),
        ("execute", ("failed", "execute"), 9, "not finished after 300000 ms", Cause.HANG),
        ("execute", ("infra", "execute"), 11, "ended by SIGTERM", Cause.NONE),
        ("flags", ("infra", "load"), 3, "no such flag", Cause.REQUEST),
        ("inputs", ("infra", "execute"), 5, "input_0_0.raw has 3 bytes", Cause.NONE),
        ("outputs", ("infra", "execute"), 7, "output_0_0.raw: No space left on device", Cause.SPACE),
        ("etdump", ("infra", "execute"), 8, "cannot write", Cause.NONE),
    ],
)
def test_an_error_of_the_runner_is_classified_by_its_stage_and_has_a_cause(
    execution: Execution, stage: str, expected: tuple[str, str], exit_code: int, message: str, cause: Cause
) -> None:
    execution.fail(stage, message, code=20, line=1)
    execution.report["exit_code"] = exit_code
    reason = f"{stage}: {' '.join(message.split())}"
    require(execution.judge(), *expected, reason, cause)
    if expected[0] == "failed":
        # The error counts more than how the runner was ended.
        execution.raw |= {"timed_out": True, "exit_code": None}
        require(execution.judge(), *expected, reason, cause)


NOT_LINKED = 'log\nCANNOT LINK EXECUTABLE "farm_runner": library "libQnnHtp.so" not found\n'


@pytest.mark.parametrize(
    ("raw", "expected", "reason", "cause"),
    [
        ({"exit_code": 139}, "failed execute", r"signal 11 \(SIGSEGV\): it touched", Cause.CRASH),
        ({"exit_code": -11}, "failed execute", r"signal 11 \(SIGSEGV\)", Cause.CRASH),
        ({"exit_code": 134}, "failed execute", r"signal 6 \(SIGABRT\)", Cause.CRASH),
        ({"exit_code": 137}, "failed execute", r"signal 9 \(SIGKILL\): something killed it, perhaps", None),
        ({"exit_code": 142}, "failed execute", "signal 14", Cause.HANG),
        ({"exit_code": 128 + 60}, "failed execute", r"signal 60 \(a real-time signal\)", None),
        ({"exit_code": 4}, "failed execute", "ended with exit code 4; it left no result.json", Cause.CRASH),
        ({"exit_code": 255}, "failed execute", "ended with exit code 255", None),
        ({"exit_code": 127, "stderr": "sh: farm_runner: not found"}, "infra execute", "did not start: .*not found",
         Cause.NONE),
        ({"exit_code": 126}, "infra execute", "did not start: exit code 126", Cause.NONE),
        ({"exit_code": 134, "stderr": NOT_LINKED}, "infra execute", "did not start: CANNOT LINK .*libQnnHtp.so", None),
        ({"exit_code": None}, "infra execute", "never reported how the runner ended", Cause.CONNECTION),
        ({"exit_code": 0}, "infra pull", "no result.json", Cause.NONE),
        ({"exit_code": None, "timed_out": True, "run_seconds": 300.2}, "failed execute", "within 300 s", Cause.HANG),
        ({"exit_code": 137, "timed_out": True}, "failed execute", "did not end within", Cause.HANG),
        ({"error": "offline", "error_stage": "push", "error_cause": "gone"}, "infra push", "offline", Cause.GONE),
        ({"error": "full", "error_stage": "push", "error_cause": "space"}, "infra push", "full", Cause.SPACE),
        ({"error": "odd", "error_stage": "pull"}, "infra pull", "odd", Cause.NONE),
    ],
)  # fmt: skip
def test_endings_without_a_report(
    execution: Execution, raw: dict[str, Any], expected: str, reason: str, cause: Cause | None
) -> None:
    execution.raw |= raw
    attempt = require(execution.judge(write_report=False), *expected.split(), cause=cause)
    assert msgspec.json.encode(attempt)
    assert re.search(reason, attempt.reason)


def test_reports_that_are_not_believed(execution: Execution) -> None:
    for code, reason in ((139, "signal 11"), (3, "exit code 3; it had reported success")):
        execution.raw["exit_code"] = code
        require(execution.judge(), "failed", "execute", f"the runner ended with {reason}")
    execution.raw["exit_code"] = 0
    for nanoseconds, reason in (
        (-5, "iterations_ns"), (2 * 10**9, "claims 2.0 s of work, and the runner ran for 0.5 s"),
    ):  # fmt: skip
        execution.report["inferences"][1]["iterations_ns"] = [nanoseconds]
        attempt = require(execution.judge(), "infra", "pull", "result.json is refused")
        assert reason in attempt.reason
        assert attempt.measurements == ()


# Outputs.


def test_too_few_inferences_are_infra(execution: Execution) -> None:
    del execution.report["inferences"][1]
    require(execution.judge(), "infra", "execute", "the runner ran 1 of 2 inferences")


def test_an_output_that_is_missing_or_of_another_size_is_infra(execution: Execution) -> None:
    output = execution.folder / "output_1_0.raw"
    output.unlink()
    require(execution.judge(), "infra", "pull", "output_1_0.raw is not there although the runner reported success")
    for size in (0, 95, 97, 10**6):
        output.write_bytes(b"\0" * size)
        require(execution.judge(), "infra", "pull", f"output_1_0.raw has {size} bytes, the runner wrote 96")


@pytest.mark.parametrize("references", [("fp32", "quantized"), ()])
@pytest.mark.parametrize("nbytes", [0, 48])
def test_a_report_whose_bytes_contradict_its_shape_is_refused(
    execution: Execution, nbytes: int, references: tuple[str, ...]
) -> None:
    execution.replace_manifest(references=references)
    execution.report["outputs"][0]["nbytes"] = nbytes
    for sample in range(2):
        (execution.folder / f"output_{sample}_0.raw").write_bytes(b"\0" * nbytes)
    reason = "result.json is refused: output 0 is float32[2, 3, 4] with"
    require(execution.judge(), "infra", "pull", reason)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "the model gives 0 outputs, the reference 1"),
        ([([24], "float32")], "output 0 is float32[24], the reference is float32[2, 3, 4]"),
        ([(list(SHAPE), "int32")], "output 0 is int32[2, 3, 4], the reference is"),
    ],
)
def test_a_model_with_other_outputs_fails(
    execution: Execution, outputs: list[tuple[list[int], str]], reason: str
) -> None:
    execution.report["outputs"] = [{"shape": shape, "dtype": dtype, "nbytes": 96} for shape, dtype in outputs]
    assert "latency" in measured(require_wrong(execution, reason))


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("fp32", 0.0, "is zero everywhere in all 2 samples"),
        ("quantized", 0.0, "is zero everywhere in all 2 samples"),
        ("fp32", 2.5, "is the constant 2.5 in all 2 samples"),
        ("quantized", math.nan, "has NaN in sample 0"),
    ],
)
def test_a_reference_without_signal_fails_even_when_all_agrees(
    execution: Execution, kind: str, value: float, problem: str
) -> None:
    for sample in range(execution.samples):
        execution.set_both(sample, 0, np.full(SHAPE, value, np.float32), kind)
    attempt = require_wrong(execution, f"the {kind} reference of output 0 {problem}, and depends on the inputs")
    assert is_the_codes_at_once(attempt), "it is the same on every device"


def test_an_output_without_signal_in_one_sample_is_judged_by_the_others(execution: Execution) -> None:
    flat = np.zeros(SHAPE, np.float32)
    execution.set_both(1, 0, flat)
    require_passed(execution)
    execution.set_output(1, 0, flat + np.float32(0.1))
    require_wrong(execution, "output 0 against")


def test_outputs_beside_one_without_signal_are_judged(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(dtypes=("float32", "float32"))
    for sample in range(2):
        execution.set_both(sample, 1, np.zeros(SHAPE, np.float32))
    dead = require(execution.judge(), "failed", "numerics", cause=Cause.NONE)
    assert "output 1 is zero everywhere" in dead.reason
    assert {(one.output, one.reference) for one in dead.comparisons} == {(0, "fp32"), (0, "quantized")}
    assert "sqnr_fp32[0]" in measured(dead)
    execution.scale_output(2)
    wrong = require(execution.judge(), "failed", "numerics", cause=Cause.NUMERICS)
    assert re.match(r"output 0 against \w+: .* \(and \d more\)$", wrong.reason)


def constant_execution(make_execution: Callable[..., Execution], value: Any, constant: str, dtype: str) -> Execution:
    """Return an execution with a second output that the graph makes constant."""
    execution = make_execution(dtypes=("float32", dtype))
    live, other = execution.manifest.outputs
    execution.replace_manifest(outputs=(live, msgspec.structs.replace(other, constant=Constant(constant))))
    for sample in range(execution.samples):
        execution.set_both(sample, 1, np.full(SHAPE, value, dtype))
    return execution


@pytest.mark.parametrize(
    ("value", "dtype"), [(8.0, "float32"), (0.0, "float32"), (math.nan, "float32"), (True, "bool"), (0, "int64")]
)
def test_a_constant_of_the_graph_is_compared_exactly(
    make_execution: Callable[..., Execution], value: Any, dtype: str
) -> None:
    execution = constant_execution(make_execution, value, "literal", dtype)
    assert "constant by the graph, compared exactly: output 1" in require_passed(execution).notes
    wrong = np.full(SHAPE, value, dtype)
    wrong.flat[3] = not value if dtype == "bool" else np.nan_to_num(wrong.flat[3]) + 1
    execution.set_output(1, 1, wrong)
    assert "output 1" in require(execution.judge(), "failed", "numerics", cause=Cause.NUMERICS).reason


@pytest.mark.parametrize(
    ("constant", "value", "given", "reason"),
    [
        ("literal", 8.0, 8.001, "output 1 is constant by the graph: max abs 0.001 from the quantized reference in"),
        # Constants that the backend computes have the limits of the case, and zero is exactly zero.
        ("computed", 8.0, 8.01, ""),
        ("computed", 8.0, 12.0, "output 1 against"),
        ("computed", 0.0, 1e-6, "output 1 against"),
    ],
)
def test_a_constant_within_the_limits_is_not_equal(
    make_execution: Callable[..., Execution], constant: str, value: float, given: float, reason: str
) -> None:
    execution = constant_execution(make_execution, value, constant, "float32")
    require_passed(execution)
    execution.set_output(1, 1, np.full(SHAPE, given, np.float32))
    if reason:
        require_wrong(execution, reason)
    else:
        assert require_passed(execution).notes == ()


def test_constants_in_half_precision_are_rounded_to_it(make_execution: Callable[..., Execution]) -> None:
    execution = constant_execution(make_execution, 0.1, "literal", "float32")
    execution.set_output(0, 1, np.full(SHAPE, np.float16(0.1), np.float32))
    require_wrong(execution)
    execution.replace_manifest(precision="fp16a8w")
    require_passed(execution)


def test_a_damaged_bundle_is_infra_at_build(execution: Execution) -> None:
    (execution.bundle_folder / "reference_fp32" / "output_0_0.raw").write_bytes(b"123")
    assert "farm setup cache prune" in require(execution.judge(), "infra", "build").reason


# Limits.


def test_one_bad_sample_of_one_output_fails_and_is_named(make_execution: Callable[..., Execution]) -> None:
    execution = make_execution(samples=3, dtypes=("float32", "float32"))
    execution.scale_output(1.5, 2, 1)
    attempt = require_wrong(execution, "output 1 against quantized: sqnr 6.021 dB < 30 dB (and 1 more)")
    broken = [comparison.violations for comparison in attempt.comparisons]
    assert broken == [(), (), ("sqnr 6.021 dB < 20 dB",), ("sqnr 6.021 dB < 30 dB",)]
    assert measured(attempt)["cosine_fp32[1]"] == pytest.approx((1.0, 1.0, 1.0))
    assert "latency" in measured(attempt)


def test_either_reference_decides(execution: Execution) -> None:
    for sample in range(2):
        execution.set_reference(sample, 0, execution.output(sample, 0) * np.float32(1.5), "fp32")
    require_wrong(execution, "output 0 against fp32: sqnr 9.542 dB < 20 dB")


def test_nan_fails_with_its_own_text(execution: Execution) -> None:
    values = execution.output(0, 0)
    values[0, 0, :3] = np.nan
    execution.set_output(0, 0, values)
    attempt = require_wrong(execution)
    assert "3 elements are NaN where the reference has numbers" in attempt.reason
    assert not any("sqnr" in metric or "cosine" in metric for metric in measured(attempt))


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(mismatch=0.0), Limits(max_abs=math.inf), Limits(sqnr_db=-math.inf), Limits(cosine=-1.0)]
)
def test_nothing_passes_that_no_limit_decides(execution: Execution, limits: Limits) -> None:
    execution.tolerance = Tolerance(fp32=limits)
    attempt = require_wrong(execution, "no limit decides output 0 (float32): give the case a tolerance at 8a8w")
    assert is_the_codes_at_once(attempt), "no device could change it"


QUANTIZING = {f"quantized_decomposed.{name}_per_tensor.out": 1 for name in ("quantize", "dequantize")}
ADDS = {"delegates": {"QnnBackend": 2}, "fallback_ops": {"aten.add.Tensor": 3}}


@pytest.mark.parametrize(
    ("manifest", "expected", "says"),
    [
        ({}, (Expectation(partitions=2, socs=("SM8350",)), Expectation(partitions=1)), ""),
        (ADDS, (Expectation(partitions=1),),
         "2 partitions and aten.add.Tensor x3 left to the CPU, expected 1 partition and nothing left to the CPU"),
        (ADDS, (Expectation(partitions=2, fallback_ops={"aten.add.Tensor": 3}),), ""),
        # The quantizing that comes with LPAI may be expected or not.
        ({"backend": "lpai", "fallback_ops": QUANTIZING}, (Expectation(partitions=1, fallback_ops={}),), ""),
        ({"backend": "lpai", "fallback_ops": QUANTIZING}, (Expectation(partitions=1, fallback_ops=QUANTIZING),), ""),
        ({"spill_fill_bytes": 8192}, (Expectation(least_spill_fill_bytes=8192),), ""),
        ({"spill_fill_bytes": 0}, (Expectation(least_spill_fill_bytes=1),), "share has 0 bytes, expected 1 or more"),
        ({}, (Expectation(least_spill_fill_bytes=1),), "share has 0 bytes, expected 1 or more"),
        ({"pte_bytes": 500}, (Expectation(most_pte_bytes=500),), ""),
        ({"pte_bytes": 501}, (Expectation(most_pte_bytes=500),), "the program has 501 bytes, expected 500 or less"),
    ],
)  # fmt: skip
def test_what_a_build_gives_has_to_be_what_the_case_expects(
    execution: Execution, manifest: dict[str, Any], expected: tuple[Expectation, ...], says: str
) -> None:
    execution.expect = expected
    execution.replace_manifest(**manifest)
    assert require(execution.judge(), *(("failed", "build") if says else ("passed", "done"))).reason.endswith(says)


def test_a_dump_has_as_many_layers_as_the_case_expects(execution: Execution) -> None:
    execution.expect = (Expectation(intermediate_outputs=2),)
    assert execution.judge().reason.startswith("the outputs of its layers cannot be read")
    kernel, layers = {"debug": True}, [{"debug": True, "delegate": "one"}, {"debug": True, "debug_id": 7}]
    for first, second, says in (
        (layers, layers, ""),
        (layers[:1], layers[:1], "1 outputs of layers were written, expected 2"),
        ([], [], "no outputs"),
        (layers, [], "0 or 2 outputs of layers were written, expected 2"),
    ):
        blocks = [LOAD_BLOCK, ("Execute", [kernel, *first]), ("Execute", [*second, *LOAD_BLOCK[1]])]
        (execution.folder / "etdump.etdp").write_bytes(write_etdump(blocks))
        attempt = execution.judge()
        assert (attempt.verdict, attempt.reason[: len(says)]) == ("failed" if says else "passed", says)


def test_what_no_simulator_executes_is_skipped_where_its_build_is_right(execution: Execution) -> None:
    execution.replace_manifest(features=("online_prepare",))
    bundle = Bundle(execution.bundle_folder, execution.manifest)
    reason = "compiled, and not executed: its graph is made by the device when it is loaded; attach a SM8650"
    attempt = require(not_simulated(execution.job, bundle), "skipped", "build", reason)
    assert (attempt.device, set(measured(attempt))) == (
        "", {"pte_size", "partitions", "delegated_ops", "fallback_ops"},
    )  # fmt: skip
    execution.expect = (Expectation(partitions=2),)
    require(not_simulated(execution.job, bundle), "failed", "build")
    # Features of a manifest decide, not the field that an older farm wrote when it compiled the bundle.
    older = msgspec.json.encode({**msgspec.to_builtins(execution.manifest), "features": (), "needs_device": "so"})
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
    execution.scale_output(-1)
    require_wrong(execution, "output 0 against fp32: top1 0.5 < 1")
    execution.metrics = (Metric("top1", output=3),)
    assert "output 3" in execution.judge().reason


def test_without_any_reference_it_only_ran(execution: Execution) -> None:
    execution.replace_manifest(references=())
    assert "it ran; there is no reference for its outputs" in require_passed(execution).notes


def test_a_fallback_is_noted_and_what_the_cpu_ran_alone_does_not_pass(execution: Execution) -> None:
    execution.replace_manifest(fallback_ops={"b": 2, "a": 1})
    attempt = require_passed(execution)
    assert (attempt.notes, measured(attempt)["fallback_ops"]) == (("left to the CPU: a x1, b x2",), (3.0,))
    execution.replace_manifest(delegates={}, delegated_ops=0, fallback_ops={"aten.fmod.Scalar_out": 1})
    reason = "nothing was delegated to the htp backend: the CPU ran it all"
    attempt = require(execution.judge(), "failed", "build", reason)
    assert attempt.notes == ("left to the CPU: aten.fmod.Scalar_out x1",)
    assert len(attempt.comparisons) == 2


# Profiles.


def test_profiles_that_do_not_fit_are_left_out_and_noted(execution: Execution, etdump: Callable[..., bytes]) -> None:
    for data, note in (
        (etdump(*[[1]] * 5), "has 5 inferences where there were 6"),
        (etdump(*[[1]] * 7), "has 7 inferences where there were 6"),
        (etdump(*[[0]] * 6), "claims 0 to 0 cycles"),
        (etdump(*[[2**63]] * 6), "claims 9223372036854775808"),
        (b"\x1b[31m" * 10, "no profile: etdump.etdp is refused: is not an ETDump: its identifier is missing"),
        # No cycles where none were asked for.
        (etdump(*[()] * 6), ""),
    ):
        (execution.folder / "etdump.etdp").write_bytes(data)
        attempt = require_passed(execution)
        assert "htp_cycles" not in measured(attempt)
        assert note in "".join(attempt.notes)
        assert bool(note) == bool(attempt.notes)


# Known issues.


@pytest.mark.parametrize(
    ("facts", "known", "passed"),
    [
        ({}, ISSUE.reason, "known issue no longer shows: HTP rounds half to even"),
        # A known issue of a stand-in excuses no device.
        ({"virtual": True}, "", ""),
        ({"intermittent": True}, ISSUE.reason, "known issue does not show this time: HTP rounds half to even"),
        ({"owner": "ada", "expires": date(2999, 12, 31)}, f"{ISSUE.reason} (ada, until 2999-12-31)", None),
        ({"owner": "ada", "expires": date(2020, 1, 31)}, "", None),
        # Elsewhere.
        ({"socs": ("SM8750",)}, "", ""),
        ({"precisions": ("fp16",)}, "", ""),
        ({"stage": "build"}, "", None),
    ],
)
def test_a_known_issue_covers_a_failure_which_stays_failed(
    execution: Execution, facts: dict[str, Any], known: str, passed: str | None
) -> None:
    execution.known_issues = (msgspec.structs.replace(ISSUE, **facts),)
    attempt = require_passed(execution)
    assert attempt.known_issue == ""
    assert passed is None or "".join(attempt.notes) == passed
    execution.scale_output(-1)
    attempt = require_wrong(execution)
    assert attempt.known_issue == known
    assert attempt.comparisons[0].violations
    if "expires" in facts and not known:
        assert "expired" in attempt.notes[0]
        assert "(ada, until 2020-01-31)" in attempt.notes[0]
    execution.raw |= {"error": "offline", "error_stage": "push"}
    infra = require(execution.judge(), "infra", "push")
    assert (infra.known_issue, infra.notes) == ("", ()), "no fault of the farm is known"


def test_a_known_issue_of_a_stand_in_covers_the_stand_in(execution: Execution) -> None:
    execution.known_issues = (msgspec.structs.replace(ISSUE, virtual=True),)
    execution.raw |= {"simulated": True}
    assert execution.judge().notes == ("known issue no longer shows: HTP rounds half to even",)
    execution.scale_output(-1)
    assert execution.judge().known_issue == ISSUE.reason


# Builds.


def test_a_compile_error_is_the_codes_and_a_dead_builder_the_farms(execution: Execution) -> None:
    failed = build_failure(execution.job, "unsupported op:\n  aten.fmod", "Traceback ...", "key", seconds=2.0)
    assert (failed.verdict, failed.stage, failed.reason) == (Verdict.FAILED, Stage.BUILD, "unsupported op: aten.fmod")
    assert (failed.log, failed.bundle_key, failed.seconds, failed.device) == ("Traceback ...", "key", 2.0, "")
    killed = build_failure(execution.job, "the builder was killed by signal 9", infra=True)
    assert (killed.verdict, killed.stage) == (Verdict.INFRA, Stage.BUILD)
    assert (failed.cause, killed.cause) == (Cause.COMPILE, Cause.BUILDER)
    assert build_failure(execution.job, "").reason
    execution.known_issues = (ISSUE,)
    assert build_failure(execution.job, "x").known_issue == ""
    execution.known_issues = (KnownIssue(reason="V68 cannot", stage="build"),)
    assert build_failure(execution.job, "x").known_issue == "V68 cannot"
    assert build_failure(execution.job, "x", infra=True).known_issue == ""


def test_on_the_cpu_nothing_has_to_be_delegated_and_no_more_than_rounding_of_fp32_is_forgiven(
    execution: Execution,
) -> None:
    execution.on_the_cpu()
    attempt = require_passed(execution)
    assert (attempt.notes, [comparison.reference for comparison in attempt.comparisons]) == ((), ["fp32"])
    numbers = measured(attempt)
    assert (numbers["partitions"], numbers["fallback_ops"]) == ((0.0,), (1.0,))
    assert "sqnr_quantized[0]" not in numbers
    execution.scale_output(1 + 1e-6)
    require_passed(execution)
    execution.scale_output(1 + 1e-4)
    assert re.fullmatch(r"output 0 against fp32: sqnr 79\.\d+ dB < 100 dB", require_wrong(execution).reason)


# Heap of the DSP.

HEAP = b"DSP:before_context_created (bytes), 928212\nDSP:after_context_freed (bytes), 930000\n"


def test_a_run_for_the_heap_has_its_numbers_and_no_others(execution: Execution) -> None:
    execution.raw["heap"] = True
    (execution.folder / "heap.txt").write_bytes(HEAP)
    attempt = require_passed(execution)
    assert {row.metric: (row.samples, row.unit, row.exact) for row in attempt.measurements} == {
        "dsp_heap_before": ((928212.0,), "bytes", False),
        "dsp_heap_after": ((930000.0,), "bytes", False),
        "dsp_heap_difference": ((1788.0,), "bytes", False),
        "partitions": ((1.0,), "count", True),
    }
    assert "DSP heap: complete" in attempt.notes
    # A crash leaves half of it.
    execution.raw["exit_code"] = 139
    (execution.folder / "heap.txt").write_bytes(HEAP[:43])
    attempt = require(execution.judge(write_report=False), "failed", "execute")
    assert list(measured(attempt)) == ["dsp_heap_before", "partitions"]
    assert "DSP heap: partial: after_context_freed is missing" in attempt.notes


@pytest.mark.parametrize(
    ("data", "simulated", "verdict", "reason"),
    [
        (None, False, "skipped", "no DSP heap: ExecuTorch wrote no profile of it; it does on Android and QNX"),
        (None, True, "skipped", "no DSP heap: the simulator has no DSP"),
        (b"hello\n", False, "infra", "DSP heap: malformed: line 1 is 'hello', which is not about the DSP"),
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
    decision = classify([tried(attempt)], others=2)
    assert (decision.classification in {Classification.NONE, Classification.FARM}, decision.repeat) == (True, False)
    health, _ = next_health(Health.HEALTHY, [], HealthMark(Event.INFRA, str(attempt.cause), attempt.reason))
    assert health is Health.HEALTHY


@pytest.mark.parametrize("heap", [True, False])
def test_an_option_that_the_runtime_refuses_is_the_fault_of_neither_device_nor_code(
    execution: Execution, heap: bool
) -> None:
    message = "backend QnnBackend refuses the option qnn_runtime_heap_profiling_path=heap.txt: Error::Internal"
    execution.fail("options", message, code=1, exit_code=3)
    execution.raw["heap"] = heap
    attempt = execution.judge()
    assert (attempt.verdict, attempt.cause) == ("skipped" if heap else "infra", Cause.REQUEST)
    assert message in attempt.reason


@pytest.mark.parametrize(
    ("data", "expected", "reason"),
    [
        (HEAP[:43], Expectation(), "DSP heap: partial: after_context_freed is missing"),
        (HEAP[43:], Expectation(), "DSP heap: partial: before_context_created is missing"),
        (HEAP.replace(b"930000", b"928211"), Expectation(), "DSP heap: 1 bytes less after the last"),
        (HEAP, Expectation(most_dsp_heap_bytes=929_999), "DSP heap: 930,000 bytes in use after the last context"),
        (HEAP, Expectation(most_dsp_heap_bytes=930_000), ""),
        (HEAP, Expectation(most_dsp_heap_kept_bytes=1_787), "DSP heap: 1,788 bytes kept, expected 1,787 or less"),
        (HEAP, Expectation(most_dsp_heap_kept_bytes=1_788), ""),
        (HEAP.replace(b"930000", b"928212"), Expectation(most_dsp_heap_kept_bytes=0), ""),
        (HEAP.replace(b"930000", b"10365396"), Expectation(most_dsp_heap_kept_bytes=4096), "DSP heap: 9,437,184 bytes"),
    ],
)
def test_a_heap_passes_with_both_numbers_within_the_limits_of_the_case(
    execution: Execution, data: bytes, expected: Expectation, reason: str
) -> None:
    execution.raw["heap"] = True
    execution.expect = (expected,)
    (execution.folder / "heap.txt").write_bytes(data)
    attempt = require(execution.judge(), *(("failed", "execute") if reason else ("passed", "done")), reason)
    assert attempt.measurements, "the numbers that were found stay"


def test_several_processes_are_judged_by_their_median_and_all_of_them_are_kept(execution: Execution) -> None:
    execution.raw["heap"] = True
    execution.expect = (Expectation(most_dsp_heap_kept_bytes=2_000),)
    for folder, after in (("", b"930000"), ("process1", b"929000"), ("process2", b"1928212")):
        (execution.folder / folder).mkdir(exist_ok=True)
        (execution.folder / folder / "heap.txt").write_bytes(HEAP.replace(b"930000", after))
    assert measured(require_passed(execution))["dsp_heap_difference"] == (788.0, 1_000_000.0, 1788.0)
    (execution.folder / "process2" / "heap.txt").unlink()
    assert execution.judge().verdict == "skipped", "an unmeasured process leaves the measurement incomplete"
