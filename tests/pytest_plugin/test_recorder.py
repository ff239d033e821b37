"""Recording of tests in the reporting process, from the reports of several workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_template import place_store

from farm.dispatch.pytest_plugin.plan import STORE_VARIABLE
from farm.dispatch.pytest_plugin.record import FACTS, DeviceFacts, SuiteRecorder
from farm.results.attempt import Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.store.view import JobView

NODEID = "test_net.py::test_relu"


class StubWorker:
    """Worker of xdist, as far as reports know it."""

    _workerinfocache = "[gw0]"


def report(worker: object, outcome: str, when: Any = "call", facts: DeviceFacts | None = None) -> Any:
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
        reports += [report(worker, outcome), report(worker, "passed", "teardown")]
    job = record(tmp_path, run_id, reports, 3 if ends_early else 2, ends_early=ends_early)
    assert job.decisive is not None
    assert job.decisive.verdict is (Verdict.FAILED if "failed" in outcomes else Verdict.PASSED)
    assert [one.verdict for one in job.attempts] == [Verdict(outcome) for outcome in sorted(outcomes, reverse=True)]


def test_a_failure_under_a_lost_lease_is_not_kept_for_later(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, facts = StubWorker(), DeviceFacts("SM-1", 7)
    reports = [report(worker, "failed", facts=facts), report(worker, "passed", "teardown", facts)]
    assert not record(tmp_path, run_id, reports, 1, ends_early=True).attempts
    assert "SM-1: the lease 7 is over: its results are not recorded" in capsys.readouterr().err
