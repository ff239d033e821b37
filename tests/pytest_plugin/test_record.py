"""Recording of tests in the reporting process, from reports of pytest to attempts."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stores import place_store

from farm.dispatch.pytest_plugin.plan import STORE_VARIABLE
from farm.dispatch.pytest_plugin.record import FACTS, DeviceFacts, SuiteRecorder, attempt_of, job_of_test
from farm.results.attempt import Attempt, Cause, Direction, Measurement, Stage, Verdict
from farm.store.records import JobView, RunRecord
from farm.store.store import open_store
from farm.store.values import case_column, case_of

# Reports of pytest -> attempts.


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


# Recording of tests in the reporting process, from the reports of several workers.


NODEID = "test_net.py::test_relu"


class StubWorker:
    """Worker of xdist, as far as reports know it."""

    _workerinfocache = "[gw0]"


def worker_report(worker: object, outcome: str, when: Any = "call", facts: DeviceFacts | None = None) -> Any:
    """Return a report of a test by a worker."""
    made: Any = pytest.TestReport(
        NODEID, ("test_net.py", 1, "test_relu"), {}, outcome, "E" if outcome == "failed" else None, when
    )  # type: ignore[arg-type]
    made.node = worker
    setattr(made, FACTS, (facts or DeviceFacts("", 0)).packed())
    return made


@pytest.fixture
def run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run in the store of the reporting process."""
    place_store(tmp_path / "farm.db")
    monkeypatch.setenv(STORE_VARIABLE, f"sqlite:///{tmp_path}/farm.db")
    with open_store(tmp_path / "farm.db") as store:
        yield store.begin_run(RunRecord("farm pytest", "ada", "bench", {}))


def record(folder: Path, run_id: str, reports: list[Any], workers: int, *, ends_early: bool) -> JobView:
    """Return the job of a test that runs on the devices of all `workers`."""
    devices = (SimpleNamespace(serial="SM-1", id="SM-1"),)
    plan: Any = SimpleNamespace(run_id=run_id, files=dict, soc="SM8650", backend="htp", devices=devices)
    config: Any = SimpleNamespace(getoption=lambda _name, _default: "each", rootpath=folder, stash={})
    recorder = SuiteRecorder(plan, config)
    for _ in range(workers):
        recorder.pytest_xdist_node_collection_finished([NODEID])
    for one in reports:
        recorder.pytest_runtest_logreport(one)
    if ends_early:
        recorder.pytest_sessionfinish()
    recorder.pytest_unconfigure()
    with open_store(folder / "farm.db") as store:
        [job] = store.runs.view(run_id).jobs
    return job


@pytest.mark.parametrize("outcomes", [("passed", "failed"), ("failed", "passed"), ("passed", "passed")])
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_test_of_each_device_fails_if_it_fails_on_any(
    outcomes: tuple[str, str], *, ends_early: bool, run_id: str, tmp_path: Path
) -> None:
    reports = []
    for outcome in outcomes:
        worker = StubWorker()
        reports += [worker_report(worker, outcome), worker_report(worker, "passed", "teardown")]
    job = record(tmp_path, run_id, reports, 3 if ends_early else 2, ends_early=ends_early)
    assert job.decisive is not None
    assert job.decisive.verdict is (Verdict.FAILED if "failed" in outcomes else Verdict.PASSED)
    assert [one.verdict for one in job.attempts] == [Verdict(outcome) for outcome in sorted(outcomes, reverse=True)]


def test_a_failure_under_a_lost_lease_is_not_kept_for_later(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, facts = StubWorker(), DeviceFacts("SM-1", 7)
    reports = [worker_report(worker, "failed", facts=facts), worker_report(worker, "passed", "teardown", facts)]
    assert not record(tmp_path, run_id, reports, 1, ends_early=True).attempts
    assert "SM-1: the lease 7 is over: its results are not recorded" in capsys.readouterr().err
