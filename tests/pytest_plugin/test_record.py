"""Reports of pytest -> attempts."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, cast

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


INFRA = DeviceFacts("SM-1", 3, infra="SM-1: it is gone", cause=Cause.GONE)
UNEXECUTED = DeviceFacts("SM-1", 3, unexecuted="nothing was delegated")


@pytest.mark.parametrize(
    ("outcome", "told", "verdict", "reason"),
    [
        ("failed", None, Verdict.FAILED, "AssertionError: no"),
        ("failed", INFRA, Verdict.INFRA, "SM-1: it is gone"),
        # The test caught the error.
        ("passed", INFRA, Verdict.PASSED, ""),
        # Upstream did not execute its program.
        ("passed", UNEXECUTED, Verdict.SKIPPED, "nothing was delegated"),
        ("failed", UNEXECUTED, Verdict.FAILED, "AssertionError: no"),
        (None, None, Verdict.SKIPPED, "set up, and not called"),
    ],
)
def test_a_test_fails_unless_the_farm_is_at_fault_and_passes_only_if_it_was_called(
    outcome: str | None, told: DeviceFacts | None, verdict: Verdict, reason: str
) -> None:
    calls = [] if outcome is None else [report("call", outcome, "AssertionError: no" if outcome == "failed" else None)]
    attempt = judged(report("setup"), *calls, report("teardown"), told=told)
    assert (attempt.verdict, attempt.reason) == (verdict, reason)
    assert (attempt.cause is Cause.GONE) == (verdict is Verdict.INFRA)


def test_a_failure_while_putting_away_counts() -> None:
    attempt = judged(report("setup"), report("call"), report("teardown", "failed", "OSError: full"))
    assert (attempt.verdict, attempt.reason) == (Verdict.FAILED, "teardown: OSError: full")


def test_every_subtest_counts() -> None:
    failures = [report("call", "failed", f"E {n}") for n in range(3)]
    attempt = judged(report("setup"), *failures, report("teardown"))
    assert (attempt.verdict, attempt.reason) == (Verdict.FAILED, "E 0 (and 2 more)")
    assert [f"E {n}" in attempt.log for n in range(3)] == [True] * 3


def test_the_traceback_stays_in_the_log_of_a_test_that_prints_much() -> None:
    failure = report("call", "failed", "E AssertionError: 0.3 dB")
    failure.sections = [("Captured log call", "INFO Visiting: aten.linear.default\n" * 10_000)]
    log = judged(report("setup"), failure, report("teardown")).log
    assert "E AssertionError: 0.3 dB" in log
    assert "---- Captured log call ----" not in log, "its beginning is cut"


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
    any_when, any_outcome = cast("Any", when), cast("Any", outcome)
    return pytest.TestReport(
        "a.py::test", ("a.py", 1, "test"), {}, any_outcome, text, any_when, duration=0.25, start=1.5
    )


def test_the_plugin_loads_no_database_driver() -> None:
    code = "import sys\nimport farm.dispatch.pytest_plugin.plugin\nsys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
