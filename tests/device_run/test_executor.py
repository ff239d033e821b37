"""Files of executions: each job is judged by its own, also while the next one runs."""
# ruff: noqa: ARG002 - the stub has the arguments of the real methods

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from made import job

from farm.devices.execution.raw import RawResult
from farm.dispatch.device_run.device_worker import Executor
from farm.dispatch.request.plan import RunPlan
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Job

WAIT_S = 30.0


class StubRun:
    """Device whose output is the name of the job, and which judges a job once the last one has been executed."""

    lacks_heap = ""
    device = SimpleNamespace(serial="stub")

    def __init__(self, last: str) -> None:
        self._last, self._has_run = last, threading.Event()

    def stage_ahead(self, find: object) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(workspace=SimpleNamespace(bundle=None)))
        return done

    def execute(self, job_id: str, staged: object, folder: Path, options: object, *, alone: bool) -> RawResult:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output").write_text(job_id)
        if job_id == self._last:
            self._has_run.set()
        return RawResult(
            job_id=job_id, serial="stub", workspace=PurePosixPath("/"), folder=folder, started_ms=1, exit_code=0
        )

    def judge(self, job: Job, bundle: object, raw: RawResult, *, operators: bool) -> Attempt:
        assert self._has_run.wait(WAIT_S)
        return Attempt(job.id, Verdict.PASSED, Stage.DONE, (raw.folder / "output").read_text())

    def options(self, job: object, execution: object) -> SimpleNamespace:
        return SimpleNamespace(flags={})

    def keep(self, attempt: Attempt, bundle: object, folder: Path) -> tuple[Attempt, tuple[()]]:
        return attempt, ()

    def keep_crash_logs(self, attempt: Attempt, folder: Path) -> tuple[Attempt, tuple[()]]:
        return attempt, ()

    def abort(self) -> None:
        self._has_run.set()


def test_jobs_that_differ_in_a_slash_and_an_underscore_have_their_own_files(tmp_path: Path) -> None:
    jobs = [job(name, suite=suite) for suite, name in (("ops", "conv_relu"), ("ops_conv", "relu"))]
    planned = [PlannedJob(one, f"{number:064x}", cached=True) for number, one in enumerate(jobs)]
    plan = RunPlan("r", tmp_path, tmp_path, tuple(planned), (), {}, tmp_path)
    worker: Any = SimpleNamespace(run=StubRun(jobs[-1].id))
    executor = Executor(plan, worker)
    try:
        first = executor.run(planned[0], planned[1], lambda: True)
        second = executor.run(planned[1], None, lambda: True)
    finally:
        executor.close()
    assert [attempt.reason for (attempt,), _ in (first, second)] == [one.id for one in jobs]
    assert list((tmp_path / "raw").iterdir()) == []
