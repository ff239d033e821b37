"""A device process runs jobs on a real (virtual) device and sends their results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome

from farm.base.clock import now_s
from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import Fault, FaultKind, clear, inject
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
    ProcessEnded,
    RunJob,
    SetGrant,
)
from farm.dispatch.process_link import ForkedProcess
from farm.dispatch.request.plan import RunPlan, read_plan
from farm.policy.retries import Tried
from farm.results.attempt import Cause, Verdict

_SECONDS = 60.0


class Device:
    """A virtual device, a process for it, and the plan of a run of three jobs."""

    def __init__(self, supervisor: Supervisor, folder: Path, plan: RunPlan) -> None:
        self.folder = folder
        [self.device] = boot(supervisor, start_adb_server(supervisor, folder / "adb"), ["SM8650"], folder / "devices")
        [runtime] = plan.runtimes.values()
        self.plan = msgspec.structs.replace(
            plan,
            folder=folder / "run",
            devices=(self.device,),
            runtimes={self.device.serial: runtime},
            jobs=tuple(msgspec.structs.replace(one, cached=True) for one in plan.jobs),
            health_checks=tuple(msgspec.structs.replace(one, cached=True) for one in plan.health_checks),
            leased=True,
        )
        self.heard: SimpleQueue[FromDevice] = SimpleQueue()
        self.health: list[str] = []
        self.process = ForkedProcess(device_forks(supervisor), folder / "device.log")
        self.process.start(self.heard.put)

    def begin(self, **facts: Any) -> None:
        plan = msgspec.structs.replace(self.plan, **facts)
        plan.prepare_folder()
        self.process.send(self.go(), Begin(str(plan.path)))

    def go(self, **facts: Any) -> SetGrant:
        return SetGrant(msgspec.structs.replace(Grant(go=True, fence=3, until_s=now_s() + 100), **facts))

    def runs(self, *history: Tried) -> list[RunJob]:
        last = len(self.plan.jobs) - 1
        jobs = [msgspec.structs.replace(one, history=history) for one in self.plan.jobs]
        return [RunJob(n, planned, more=n < last) for n, planned in enumerate(jobs)]

    def hear(self) -> FromDevice:
        """Return the next message; events of the device's health are kept."""
        try:
            message = self.heard.get(timeout=_SECONDS)
        except Empty:
            raise AssertionError((self.folder / "device.log").read_text()) from None
        if isinstance(message, DeviceEvent):
            self.health.append(message.event.event)
        return message

    def next(self) -> FromDevice:
        """Return the next answer."""
        while isinstance(message := self.hear(), DeviceEvent | JobBegun):
            continue
        return message

    def await_begin(self) -> None:
        """Wait until a job begins."""
        while not isinstance(message := self.hear(), JobBegun):
            assert isinstance(message, DeviceEvent), message

    def sessions(self) -> list[Path]:
        """Return what sessions have left on the device."""
        return list((self.folder / "devices" / self.device.serial).glob("data/local/tmp/farm*/**/run-*"))


@pytest.fixture(name="plan", scope="module")
def _plan(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    folder = tmp_path_factory.mktemp("compiled")
    home = FarmHome(farm_cache, folder / "state", folder)
    home.farm("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add or gelu or softmax", "--virtual", "1", code=0)
    [path] = (folder / "state" / "runs").glob("*/plan.json")
    return read_plan(path)


@pytest.fixture(name="device")
def _device(plan: RunPlan, tmp_path: Path) -> Iterator[Device]:
    with Supervisor() as supervisor:
        device = Device(supervisor, tmp_path, plan)
        yield device
        device.process.close()


def test_jobs_end_one_after_the_other_and_a_run_that_is_broken_off_leaves_the_device(device: Device) -> None:
    device.begin()
    device.process.send(*device.runs())
    for number in range(3):
        ended = device.next()
        assert isinstance(ended, JobEnded), ended
        assert ended.number == number
        assert [attempt.verdict for attempt in ended.attempts] == [Verdict.PASSED]
        assert ended.attempts[0].job_id == device.plan.jobs[number].job.id
    assert device.health == ["check_passed"]
    # The same jobs, which would take minutes now.
    device.begin(folder=device.folder / "long", iterations=100_000)
    device.process.send(*device.runs())
    device.await_begin()
    device.process.send(SetGrant(Grant(go=False)), Abort(), ApplyGrant())
    assert [device.next() for _ in range(4)] == [
        JobReturned(off=True, number=number) for number in (0, 1, 2, GRANT_APPLIED)
    ]
    assert not device.sessions()
    # A job that farm broke off is no event of the device.
    assert set(device.health) == {"check_passed"}


@pytest.mark.whole
def test_without_a_lease_nothing_begins_and_with_one_it_does(device: Device) -> None:
    device.begin()
    device.process.send(device.go(until_s=now_s() - 1), *device.runs())
    assert [device.next() for _ in range(3)] == [JobReturned(off=True, number=number) for number in range(3)]
    device.process.send(device.go(), *device.runs())
    assert all(isinstance(device.next(), JobEnded) for _ in range(3))


@pytest.mark.whole
def test_what_another_device_found_decides_with_this_one(device: Device) -> None:
    inject(device.folder / "devices" / device.device.serial, Fault(FaultKind.WRONG_NUMBERS, after_bytes=1000, times=0))
    device.begin()
    first = RunJob(0, device.plan.jobs[0])
    # News, and another device of the run could try it.
    device.process.send(device.go(others=("other@host",)), first)
    ended = device.next()
    assert isinstance(ended, JobEnded)
    assert ended.attempts[-1].verdict is Verdict.INFRA
    [mine] = ended.repeat
    assert (mine.device, mine.cause) == (device.device.id, Cause.NUMERICS)
    # The code is at fault after the same result on another device.
    other = msgspec.structs.replace(mine, device="other@host")
    again = msgspec.structs.replace(first.planned, history=(other,))
    device.process.send(msgspec.structs.replace(first, planned=again))
    ended = device.next()
    assert isinstance(ended, JobEnded)
    assert ended.attempts[-1].verdict is Verdict.FAILED
    assert not ended.repeat


@pytest.mark.whole
def test_a_device_that_is_away_is_brought_back_by_its_process(device: Device) -> None:
    root = device.folder / "devices" / device.device.serial
    device.begin()
    inject(root, Fault(FaultKind.OFFLINE))
    first = RunJob(0, device.plan.jobs[0])
    device.process.send(first)
    back = device.next()
    assert isinstance(back, JobReturned)
    assert back.unfit
    clear(root)
    device.process.send(device.go(go=False, recover=True), ApplyGrant())
    assert device.next() == JobReturned(recovered=True)
    device.process.send(device.go(), first)
    assert isinstance(device.next(), JobEnded)
    assert "recovered" in device.health


@pytest.mark.whole
def test_a_process_that_is_killed_says_so_last(device: Device) -> None:
    device.begin(iterations=100_000)
    device.process.send(*device.runs())
    device.await_begin()
    device.process.kill()
    died = device.next()
    assert isinstance(died, ProcessEnded)
    assert "signal 9" in died.reason
