"""What becomes of a job whose worker process died."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from stub_run import Quiet

from farm.errors import StoreError
from farm.pool.device_pool import DevicePool
from farm.request.plan import PlannedJob, RunPlan
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.run.controller import Controller
from farm.run.scheduler import DeviceScheduling
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = Job(Case("mine", "add", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "htp", "8a8w"))


class Scheduler(DeviceScheduling):
    """Remembers which items are to be run again."""

    def __init__(self) -> None:
        super().__init__(lambda _: "SM8650", lambda _: 0, ["SM8650"])
        self.pending_again: list[str] = []

    def mark_test_pending(self, item: str) -> None:
        self.pending_again.append(item)


@dataclass
class Heard:
    """What became of a job whose worker died."""

    ended: list[dict[str, Any]]
    notes: list[str]
    again: list[str]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


@pytest.fixture
def run_id(store: Store) -> str:
    run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
    store.plan_jobs(run_id, [JOB])
    return run_id


def make_controller(store: Store, run_id: str, listener: Quiet) -> Controller:
    plan = RunPlan(run_id, Path(), Path(), (PlannedJob(JOB, "", cached=True),), (), {}, 1, 0, 1.0, Path())
    return Controller(plan, listener, store, DevicePool((), store, None, listener.note))


def die(store: Store, run_id: str, times: int = 1, last_words: str = "") -> Heard:
    listener, scheduler = Quiet(), Scheduler()
    controller = make_controller(store, run_id, listener)
    for _ in range(times):
        report = pytest.TestReport(JOB.id, ("", None, ""), {}, "failed", "it died", "???")  # type: ignore[arg-type]
        report.node = object()  # type: ignore[attr-defined]
        controller._workers.broke_down(report.node, last_words)
        controller.pytest_handlecrashitem(JOB.id, report, scheduler)
        if report.outcome == "failed":
            controller.pytest_runtest_logreport(report)
    return Heard(listener.ended, listener.notes, scheduler.pending_again)


def test_a_job_is_tried_once_more_and_is_the_farms_fault_after_that(store: Store, run_id: str) -> None:
    heard = die(store, run_id, times=2, last_words="Traceback\n\x1b[2JValueError: no")
    assert heard.again == [JOB.id]
    [attempt] = store.runs.view(run_id).jobs[0].attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, Cause.WORKER)
    assert attempt.log == "Traceback\nValueError: no"
    assert [shown["verdict"] for shown in heard.ended] == ["infra"]
    # It has a result: this one.
    assert heard.notes == []


def test_what_breaks_a_worker_over_a_job_is_the_farms_fault_and_its_traceback_is_kept(
    store: Store, run_id: str
) -> None:
    listener = Quiet()
    controller = make_controller(store, run_id, listener)
    controller._sched = Scheduler()
    traceback = "Traceback (most recent call last):\n" + "  frame\n" * 20_000 + "\x1b[2JValueError: no"
    controller.pytest_runtest_logreport(pytest.TestReport(JOB.id, ("", None, ""), {}, "failed", traceback, "call"))
    [attempt] = store.runs.view(run_id).jobs[0].attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, Cause.WORKER)
    assert attempt.reason == "the worker broke down over this job: ValueError: no"
    assert attempt.log.endswith("  frame\nValueError: no")
    assert len(attempt.log) < 70_000
    assert [shown["verdict"] for shown in listener.ended] == ["infra"]


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.FAILED])
def test_what_was_written_down_before_it_died_counts(store: Store, run_id: str, verdict: Verdict) -> None:
    store.record_attempt(run_id, Attempt(JOB.id, verdict, Stage.DONE, "", started_ms=1))
    heard = die(store, run_id)
    assert heard.again == []
    assert [shown["verdict"] for shown in heard.ended] == [str(verdict)]
    assert len(store.runs.view(run_id).jobs[0].attempts) == 1


def test_a_verdict_is_not_taken_back_by_trouble_that_came_after_it(store: Store, run_id: str) -> None:
    for number, verdict in enumerate((Verdict.FAILED, Verdict.INFRA), start=1):
        store.record_attempt(run_id, Attempt(JOB.id, verdict, Stage.DONE, "", started_ms=number))
    heard = die(store, run_id, times=2)
    assert heard.again == []
    assert {shown["verdict"] for shown in heard.ended} == {"failed"}
    assert len(store.runs.view(run_id).jobs[0].attempts) == 2


def test_a_store_that_refuses_is_told_of(store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "record_attempt", refuse)
    heard = die(store, run_id, times=2)
    assert [note for note in heard.notes if "the disk is full" in note]
