"""Executions of an attempt with other outputs than the last execution, which is compared with the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from farm.results.attempt import Attempt, Cause
from farm.suites.suite import KnownIssue

if TYPE_CHECKING:
    from .conftest import Execution


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
