"""What becomes of a job whose worker process died."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farm.errors import StoreError
from farm.pool.device_pool import DevicePool
from farm.request.plan import PlannedJob, RunPlan
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.run.controller import Controller
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = Job(Case("mine", "add", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "htp", "8a8w"))


class Ear:
    """Front and scheduler: it remembers what it is told."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.pending: list[str] = []

    def job_ended(self, shown: dict[str, Any]) -> None:
        self.ended.append(shown)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def mark_test_pending(self, item: str) -> None:
        self.pending.append(item)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


@pytest.fixture
def run_id(store: Store) -> str:
    run_id = store.begin_run(RunRecord("farm run", "ann", "bench", {}))
    store.plan_jobs(run_id, [JOB])
    return run_id


def die(store: Store, run_id: str, ear: Ear, times: int = 1) -> None:
    plan = RunPlan(run_id, Path(), Path(), (PlannedJob(JOB, "", cached=True),), (), {}, 1, 0, 1.0, Path())
    anything: Any = ear
    pool = DevicePool((), store, None, ear.note)
    controller = Controller(plan, anything, store, pool)
    for _ in range(times):
        report = pytest.TestReport(JOB.id, ("", None, ""), {}, "failed", "it died", "call")
        controller.pytest_handlecrashitem(JOB.id, report, anything)


def test_a_job_is_tried_once_more_and_is_the_farms_fault_after_that(store: Store, run_id: str) -> None:
    ear = Ear()
    die(store, run_id, ear, times=2)
    assert ear.pending == [JOB.id]
    [attempt] = store.runs.view(run_id).jobs[0].attempts
    assert (attempt.verdict, attempt.cause) == (Verdict.INFRA, Cause.WORKER)
    assert [shown["verdict"] for shown in ear.ended] == ["infra"]


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.FAILED])
def test_what_was_written_down_before_it_died_counts(store: Store, run_id: str, verdict: Verdict) -> None:
    store.record_attempt(run_id, Attempt(JOB.id, verdict, Stage.DONE, "", started_ms=1))
    ear = Ear()
    die(store, run_id, ear)
    assert ear.pending == []
    assert [shown["verdict"] for shown in ear.ended] == [str(verdict)]
    assert len(store.runs.view(run_id).jobs[0].attempts) == 1


def test_a_verdict_is_not_taken_back_by_trouble_that_came_after_it(store: Store, run_id: str) -> None:
    for number, verdict in enumerate((Verdict.FAILED, Verdict.INFRA), start=1):
        store.record_attempt(run_id, Attempt(JOB.id, verdict, Stage.DONE, "", started_ms=number))
    ear = Ear()
    die(store, run_id, ear, times=2)
    assert ear.pending == []
    assert {shown["verdict"] for shown in ear.ended} == {"failed"}
    assert len(store.runs.view(run_id).jobs[0].attempts) == 2


def test_a_store_that_refuses_is_told_of(store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "record_attempt", refuse)
    ear = Ear()
    die(store, run_id, ear, times=2)
    assert [note for note in ear.notes if "the disk is full" in note]
