"""Messages of a device process, with a stub in the place of its worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.devices.health import HealthEvent
from farm.dispatch.device_process import DeviceLoop
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.messages import (
    Abort,
    ApplyGrant,
    Begin,
    DeviceEvent,
    Grant,
    JobBegun,
    JobEnded,
    JobReturned,
    RunJob,
    SetGrant,
)
from farm.dispatch.request.plan import RunPlan
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import PlannedJob

PLANNED = PlannedJob(health_check_job("SM8650", "htp"), "key", cached=True)


class StubWorker:
    """Passes every job, and reports `event` before each."""

    def __init__(self, _plan: RunPlan, _number: int, grant: Callable[[], Grant], **parts: Any) -> None:
        self._grant, self._record_health = grant, parts["record_health"]
        self.event: HealthEvent | None = None
        self.jobs = 0

    def run(self, planned: PlannedJob, *_: object) -> JobEnded | JobReturned:
        if not self._grant().go:
            return JobReturned(off=True)
        self.jobs += 1
        if self.event is not None:
            self._record_health(self.event)
        return JobEnded((Attempt(planned.job.id, Verdict.PASSED, Stage.DONE, ""),))

    def apply_grant(self) -> JobReturned:
        return JobReturned(off=True)

    def abort(self) -> None: ...
    def close(self) -> None: ...


class Process:
    """A loop that is stepped."""

    def __init__(self, folder: Path) -> None:
        self.workers: list[StubWorker] = []
        self.told: list[Any] = []
        self.loop = DeviceLoop(self.told.append, self._make)  # type: ignore[arg-type]
        plan = RunPlan("run", folder, folder, (PLANNED,), (), {}, folder)
        plan.write()
        self.begin = Begin(str(plan.path))

    def _make(self, *arguments: Any, **parts: Any) -> StubWorker:
        self.workers.append(StubWorker(*arguments, **parts))
        return self.workers[-1]

    def take(self, *messages: Any) -> list[Any]:
        """Handle messages, and return the answers."""
        self.told.clear()
        for message in messages:
            self.loop.take(message)
        while self.loop.has_message:
            self.loop.step()
        return list(self.told)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_a_worker_counts_failures_from_shard_to_shard_of_a_run(process: Process) -> None:
    go, stop = SetGrant(Grant(go=True, fence=1)), SetGrant(Grant(go=False))
    for number in range(3):
        # A shard, then the device is left, and the next shard of the run follows under another lease.
        begin = [] if number else [process.begin]
        answers = process.take(go, *begin, RunJob(number, PLANNED))
        assert [type(one) for one in answers] == [JobBegun, JobEnded]
        assert process.take(stop, ApplyGrant()) == [JobReturned(off=True)]
    [worker] = process.workers
    assert worker.jobs == 3


def test_a_broken_job_tells_no_health_event_and_the_run_begins_with_another_worker(process: Process) -> None:
    go = SetGrant(Grant(go=True))
    process.take(go, process.begin)
    process.workers[0].event = HealthEvent("phone", "check_failed", "suspect", "it was broken off")
    assert any(isinstance(one, DeviceEvent) for one in process.take(RunJob(0, PLANNED)))
    answers = process.take(Abort(), RunJob(1, PLANNED))
    assert not any(isinstance(one, DeviceEvent) for one in answers)
    assert answers[-1] == JobReturned(off=True, number=1)
    process.take(go, process.begin, RunJob(1, PLANNED))
    assert [worker.jobs for worker in process.workers] == [2, 1]
