"""Outputs by name, and writes of a module to its inputs and buffers: verdicts and texts for readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from farm.devices.execution.content_store import options_for
from farm.devices.execution.raw import RunnerOptions
from farm.results.attempt import Cause, Stage, Verdict
from farm.suites.suite import Metric

if TYPE_CHECKING:
    from conftest import Execution


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


def test_a_broken_limit_names_the_output(writing: Execution) -> None:
    for place, reason in enumerate(("input x as written against", "output aux against", "output [1].0 against")):
        writing.scale_output(-1, 1, place)
        attempt = writing.judge()
        assert (attempt.verdict, attempt.stage) == (Verdict.FAILED, Stage.NUMERICS)
        assert attempt.reason.startswith(reason)
        writing.scale_output(-1, 1, place)


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


def test_a_metric_names_its_output(writing: Execution) -> None:
    writing.metrics = (Metric("top1", output="aux", least=0.9), Metric("top1", output=1, least=0.9))
    attempt = writing.judge()
    assert attempt.verdict is Verdict.PASSED
    assert {"top1[aux]", "top1[1]"} <= {one.metric for one in attempt.measurements}
    writing.metrics = (Metric("top1", output="boxes", least=0.9),)
    assert "top1 is wanted of output boxes, which there is not" in writing.judge().reason


def test_a_program_with_a_state_is_executed_once_per_sample(execution: Execution) -> None:
    asked = RunnerOptions(iterations=5, warm_up=2)
    assert options_for(execution.manifest, asked) == asked
    once = options_for(msgspec.structs.replace(execution.manifest, stateful=True), asked)
    assert (once.iterations, once.warm_up) == (1, 0)
