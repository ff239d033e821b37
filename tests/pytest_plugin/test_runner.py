"""Fixture `runner` with a stub of its worker: an execution is judged while its files are on the device."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import made
import numpy as np
import pytest

from farm.builds.bundles.bundle import Bundle, TensorSpec
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.dispatch.pytest_plugin.runner import DeviceProgram, Runner
from farm.dispatch.pytest_plugin.worker import WrongNumbersError
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.suites.suite import InputSpec, Job

SPEC = TensorSpec((2,), "float32")
REPORT = {
    "schema": 1, "ok": True, "exit_code": 0, "load_ns": 5, "outputs": [{"shape": [2], "dtype": "float32", "nbytes": 8}],
    "inferences": [{"line": 0, "iterations_ns": [5], "differing": {"count": 0, "executions": []}}],
}  # fmt: skip


class StubRun:
    """Run on a device that has the files of the last execution alone."""

    runtime = SimpleNamespace(one_shot=False, runner="farm_runner")

    def flags(self, *_: object) -> dict[str, str]:
        return {}

    def run(self, job_id: str, _: Bundle, folder: Path, *__: object, **___: object) -> RawResult:
        folder.mkdir(parents=True)
        np.zeros(2, np.float32).tofile(folder / "output_0_0.raw")
        (folder / RESULT_FILE).write_text(json.dumps(REPORT))
        self.last = folder
        return RawResult(
            job_id=job_id, serial="s", workspace=PurePosixPath("/w"), folder=folder, started_ms=1, exit_code=0,
            run_seconds=1.0,
        )  # fmt: skip

    def judge(self, job: Job, _: Bundle, raw: RawResult) -> Attempt:
        if raw.folder != self.last:
            return Attempt(job.id, Verdict.INFRA, Stage.EXECUTE, "the files are gone", device="s", cause=Cause.DAMAGE)
        return Attempt(job.id, Verdict.FAILED, Stage.NUMERICS, "wrong", device="s", cause=Cause.NUMERICS)


def test_a_wrong_number_stays_one_after_later_executions(tmp_path: Path) -> None:
    worker = SimpleNamespace(
        scratch=tmp_path, info=SimpleNamespace(soc="SM8650", serial="s"), run=StubRun(),
        plan=SimpleNamespace(soc="SM8650", backend="htp"), executed=lambda *_: None, checked=lambda attempt, _: attempt,
    )  # fmt: skip
    bundle = Bundle(tmp_path, made.manifest(inputs=(SPEC,), outputs=(SPEC,)))
    runner, program = Runner(cast("Any", worker)), DeviceProgram(bundle, made.job(inputs=(InputSpec((2,)),)))
    first, _ = runner(program), runner(program)
    with pytest.raises(WrongNumbersError, match="wrong"):
        first.check()
