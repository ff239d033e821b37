"""A device process runs jobs on a real (virtual) device and sends their results."""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from stub_farm import make_bundle, make_stub_farm

from farm.base.clock import now_s
from farm.base.processes import Supervisor
from farm.builds.bundles.cache import BundleCache
from farm.dispatch.device_forks import device_forks
from farm.dispatch.messages import (
    GRANT_APPLIED,
    Abort,
    ApplyGrant,
    Begin,
    DeviceEvent,
    FromDevice,
    Grant,
    JobBegun,
    JobEnded,
    JobReturned,
    RunJob,
    SetGrant,
)
from farm.dispatch.process_link import ForkedProcess
from farm.dispatch.request.plan import RunPlan
from farm.dispatch.request.profiling import Profile
from farm.results.attempt import Verdict


class Device:
    """A virtual device with a stub of its runner, and a process for it."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        farm = make_stub_farm(folder, devices=1, jobs=3, latency_ms=20, planted={}, supervisor=supervisor)
        self.plan = RunPlan(
            "run", folder / "run", farm.cache_root, farm.jobs, farm.devices, farm.runtimes, folder / "artifacts",
            health_checks=farm.health_checks, leased=True, profile=Profile.OFF,
        )  # fmt: skip
        self.health: list[str] = []
        self._log, self._heard = folder / "device.log", SimpleQueue[FromDevice]()
        self.process = ForkedProcess(device_forks(supervisor), self._log)
        self.process.start(self._heard.put)

    def begin(self, **facts: Any) -> list[RunJob]:
        """Begin a run of the plan with `facts`, and return its jobs."""
        plan = msgspec.structs.replace(self.plan, **facts)
        plan.prepare_folder()
        self.process.send(Begin(str(plan.path)))
        return [RunJob(n, planned, more=n < len(plan.jobs) - 1) for n, planned in enumerate(plan.jobs)]

    def hear(self) -> FromDevice:
        """Return the next message; events of the device's health are kept."""
        try:
            message = self._heard.get(timeout=60)
        except Empty:
            raise AssertionError(self._log.read_text()) from None
        if isinstance(message, DeviceEvent):
            self.health.append(message.event.event)
        return message

    def answers(self, count: int) -> list[FromDevice]:
        """Return the next answers."""
        found: list[FromDevice] = []
        while len(found) < count:
            if not isinstance(message := self.hear(), DeviceEvent | JobBegun):
                found.append(message)
        return found


def lease(until_s: float) -> SetGrant:
    return SetGrant(Grant(go=True, fence=3, until_s=until_s))


def test_jobs_end_one_after_the_other_and_a_broken_run_leaves_the_device(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        device = Device(supervisor, tmp_path)
        runs = device.begin()
        # Without a lease nothing begins.
        device.process.send(lease(now_s() - 1), *runs)
        assert device.answers(3) == [JobReturned(off=True, number=number) for number in range(3)]
        device.process.send(lease(now_s() + 100), *runs)
        for run, ended in zip(runs, device.answers(3), strict=True):
            assert isinstance(ended, JobEnded), ended
            [attempt] = ended.attempts
            assert (ended.number, attempt.verdict) == (run.number, Verdict.PASSED), attempt
            assert attempt.job_id == run.planned.job.id
        assert device.health == ["check_passed"]
        # The same jobs, which take minutes now.
        key = make_bundle(BundleCache(device.plan.cache_root), "pass 100000")
        jobs = tuple(msgspec.structs.replace(one, key=key) for one in device.plan.jobs)
        device.process.send(*device.begin(folder=tmp_path / "long", jobs=jobs))
        while not isinstance(device.hear(), JobBegun):
            continue
        device.process.send(SetGrant(Grant(go=False)), Abort(), ApplyGrant())
        assert device.answers(4) == [JobReturned(off=True, number=number) for number in (0, 1, 2, GRANT_APPLIED)]
        assert not list((tmp_path / "devices").glob("*/data/local/tmp/farm*/**/run-*"))
        # A job that farm broke off is no event of the device.
        assert set(device.health) == {"check_passed"}
        device.process.close()
