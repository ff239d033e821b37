"""Reports of pytest -> attempts."""

from __future__ import annotations

import math

import pytest

from farm.dispatch.pytest_plugin.record import FACTS, DeviceFacts, attempt_of, job_of_test
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.values import case_column, case_of


def test_a_job_is_called_like_its_test() -> None:
    nodeid = "tests/test_net.py::TestNet::test_shape[1-(2, 3)]"
    job = job_of_test(nodeid, "SM8650", "htp", "")
    assert job.id == f"pytest/{nodeid}[SM8650-htp]"
    assert case_of(job.id) == nodeid


def test_names_that_the_store_cannot_hold_stay_apart() -> None:
    jobs = [job_of_test(f"tests/test_net.py::test[{'x' * 600}{n}]", "SM8650", "htp", "") for n in range(2)]
    assert len({job.id for job in jobs}) == 2
    assert all(len(job.id) <= 512 for job in jobs)
    columns = {case_column(job.case.name) for job in jobs}
    assert len(columns) == 2
    assert all(len(column) <= 64 for column in columns)


def test_every_failure_but_one_of_the_farm_is_the_test_s() -> None:
    failure = report("call", "failed", "AssertionError: no\nmore of it")
    assert judged(report("setup"), failure, report("teardown")).verdict is Verdict.FAILED

    infra = DeviceFacts("SM-1", 3, infra="SM-1: it is gone", cause=Cause.GONE)
    attempt = judged(report("setup"), failure, report("teardown"), told=infra)
    assert (attempt.verdict, attempt.reason, attempt.cause) == (Verdict.INFRA, "SM-1: it is gone", Cause.GONE)


def test_what_broke_and_was_caught_is_no_failure() -> None:
    answer = DeviceFacts("SM-1", 3, infra="SM-1: it was gone for a moment")
    assert judged(report("setup"), report("call"), report("teardown"), told=answer).verdict is Verdict.PASSED


def test_a_failure_while_putting_away_counts() -> None:
    attempt = judged(report("setup"), report("call"), report("teardown", "failed", "OSError: full"))
    assert (attempt.verdict, attempt.reason) == (Verdict.FAILED, "teardown: OSError: full")


def test_every_subtest_counts() -> None:
    failures = [report("call", "failed", f"E {n}") for n in range(3)]
    attempt = judged(report("setup"), *failures, report("teardown"))
    assert (attempt.verdict, attempt.reason) == (Verdict.FAILED, "E 0 (and 2 more)")
    assert [f"E {n}" in attempt.log for n in range(3)] == [True] * 3


def test_a_test_that_should_fail_and_does_not() -> None:
    passed = report("call")
    passed.wasxfail = "ticket 7"
    attempt = judged(report("setup"), passed, report("teardown"))
    assert attempt.verdict is Verdict.PASSED
    assert attempt.notes == ("expected to fail, and passed: ticket 7",)


def test_hostile_text_is_cleaned() -> None:
    attempt = judged(report("setup"), report("call", "failed", "\x1b[31mred\x07\u202e"), report("teardown"))
    assert attempt.reason == "red\N{SYMBOL FOR BELL}\\u202e"
    assert "\x1b" not in attempt.log


def test_numbers_come_through_whole() -> None:
    measured = Measurement("sqnr", "dB", Direction.HIGHER, (math.inf, 1.5))
    answer = DeviceFacts("SM-1", 0, stage=Stage.LOAD, measurements=(measured,))
    assert judged(report("setup"), report("call"), report("teardown"), told=answer).measurements == (measured,)


def judged(*reports: pytest.TestReport, told: DeviceFacts | None = None) -> Attempt:
    if told is not None:
        setattr(reports[-1], FACTS, told.packed())
    return attempt_of("pytest/a.py::test[SM8650-htp]", reports)


def report(when: str, outcome: str = "passed", text: str | None = None) -> pytest.TestReport:
    return pytest.TestReport(
        "a.py::test",
        ("a.py", 1, "test"),
        {},
        outcome,  # type: ignore[arg-type]
        text,
        when,  # type: ignore[arg-type]
        duration=0.25,
        start=1_000_000.5,
    )
