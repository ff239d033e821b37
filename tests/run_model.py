"""Model of a run in one thread: real dispatcher, jobs, device runners, pool and workers, over scripted devices.

A device process is a `Process` here, which handles one message at a time; each moment at which it could be killed is a
`point`. The world has a clock of its own.
"""
# ruff: noqa: ARG002 - stand-ins have the arguments of the real methods

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from log_lines import LogLines
from made import device, job

from farm.base.errors import LocalError
from farm.devices.device import Device
from farm.dispatch.device_process import DeviceLoop, Parts, Worker
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.dispatcher import Dispatcher
from farm.dispatch.local_jobs import LocalJobs
from farm.dispatch.messages import FromDevice, ProcessEnded, ToDevice
from farm.dispatch.pool.device_pool import DevicePool
from farm.dispatch.request.request import RunPlan
from farm.dispatch.run.run import LocalRecords
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import PlannedJob, ShardResult

# Every step lets each process do one thing; a run of six jobs takes about 40.
MOST_STEPS = 600


class Killed(BaseException):
    """Exception that stands for the death of a process."""


@dataclass
class Script:
    """Events of a run, by the number of the point at which they happen."""

    kills: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Devices whose workers are killed."""
    full: range = range(0)
    """Between these points this machine's disk is full."""
    ailing: dict[int, int] = field(default_factory=dict)
    """Number of failures of a device before it recovers, by its number."""
    is_unrecoverable: tuple[int, ...] = ()
    """Devices that cannot be brought back."""
    wrong: tuple[int, ...] = ()
    """Devices that compute wrong numbers, although their health check passes."""
    refusing: tuple[int, ...] = ()
    """Devices that refuse every program, although their health check passes."""
    virtual: tuple[int, ...] = ()
    """Devices that are virtual: jobs are such as only others run."""
    losing: dict[int, int] = field(default_factory=dict)
    """Number of jobs during which the connection to a device breaks, by its number; the next health check fails."""
    is_lost: bool = False
    """A device whose connection broke does not come back."""
    no_server: tuple[range, ...] = ()
    """Between these points no adb server listens."""
    ends_server: tuple[int, ...] = ()
    """Jobs that end the adb server, by their number."""

    def lacks_server(self, point: int) -> bool:
        """Return whether no adb server listens at a point."""
        return any(point in away for away in self.no_server)


class World:
    """State of a simulated run."""

    def __init__(self, folder: Path, script: Script, *, devices: int = 2, jobs: int = 6) -> None:
        self.script, self.points, self.now_s = script, 0, 0.0
        self.notes = LogLines()
        self.recorded: dict[str, list[Attempt]] = {}
        self.is_sleeping = False
        planned = [PlannedJob(job(f"add{n}"), str(n), cached=True) for n in range(jobs)]
        kinds = ["virtual" if n in script.virtual else "hardware" for n in range(devices)]
        fleet = [device(f"device-{n}", kind=kind) for n, kind in enumerate(kinds)]
        self.plan = RunPlan(
            "run", folder, folder, tuple(planned), tuple(fleet),
            {}, folder, iterations=1, warm_up=0, timeout_s=1.0,
        )  # fmt: skip
        self.plan.prepare_folder()
        store: Any = Records(self)
        front: Any = Front()
        self.pool = Stepped(self.plan.devices, store, None)
        self.processes: list[Process] = []
        self.host = SteppedDispatcher(self.make)
        self.jobs = LocalJobs(self.plan, self.pool, self.host, front)
        self.runners = [
            DeviceRunner(device, self.jobs, self.host, linger_s=math.inf, rest_s=math.inf)
            for device in self.plan.devices
        ]
        self.recorder: Any = SteppedRecorder(self, LocalRecords("run", store))

    def make(self, device: Device) -> Process:
        """Return a new device process."""
        process = Process(self, self.plan.devices.index(device))
        self.processes.append(process)
        return process

    def point(self, process: Process | None = None) -> None:
        """Count a moment at which a process can be killed; raise Killed when it is this one."""
        self.points += 1
        for number in self.script.kills.get(self.points, ()):
            victim = next((one for one in self.processes if one.number == number and one.is_alive), None)
            if victim is process and process is not None:
                raise Killed
            if victim is not None:
                victim.end("killed")
        if process is not None and not process.is_alive:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Let time pass for a process that waits; everything else goes on."""
        self.now_s += seconds
        if not self.is_sleeping:
            self.is_sleeping = True
            self.look()
            self.is_sleeping = False
        self.points += 1

    def look(self) -> None:
        """Let the pool look, and the dispatcher decide."""
        self.pool.look()
        for runner in self.runners:
            runner.tick()
        self.host.drain()

    def run(self) -> int:
        """Run to the end and return how many steps that took. Raises AssertionError for a run that does not end."""
        try:
            return self._run()
        finally:
            self.notes.close()

    def _run(self) -> int:
        self.jobs.begin(self.runners, self.recorder, lambda _: None)
        self.pool.begin(self.jobs.pool_changed)
        for step in range(MOST_STEPS):
            self.look()
            if self.jobs.is_over:
                return step
            for process in list(self.processes):
                process.step()
            self.now_s += 0.25
        raise AssertionError(f"it never ends: {self.notes} {[runner.phase for runner in self.runners]}")

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of every job that has one about its code."""
        return {
            job: attempts[-1].verdict
            for job, attempts in self.recorded.items()
            if attempts[-1].verdict is not Verdict.INFRA
        }


class SteppedDispatcher(Dispatcher):
    """A dispatcher without a thread, on the clock of the world."""

    def drain(self) -> None:
        """Call everything that is posted."""
        while not self._actions.empty():
            self._actions.get()()


class SteppedRecorder:
    """A recorder without a thread: everything is recorded at once."""

    def __init__(self, world: World, records: LocalRecords) -> None:
        self._world, self._records = world, records

    def result(self, result: ShardResult) -> None:
        refused = self._records.record([result])
        self._world.jobs.recorded([result], refused)

    def after(self, device: str, write: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        write()
        done()


class Process:
    """A device process, as a device runner uses it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.is_alive, self.is_stopped = world, number, True, False
        self._answer: Callable[[FromDevice], None] = lambda _: None
        self._loop = DeviceLoop(self._send, self._make)

    def start(self, answer: Callable[[FromDevice], None]) -> None:
        self._answer = answer
        try:
            self.world.point(self)
        except Killed:
            self.end("killed")

    def send(self, *messages: ToDevice) -> None:
        for message in messages:
            self._loop.take(message)

    def close(self) -> None:
        self.is_alive = False

    def kill(self) -> None:
        self.end("killed")

    def end(self, reason: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self._answer(ProcessEnded(reason))

    def step(self) -> None:
        """Handle the next message, if there is any."""
        if not self.is_alive:
            return
        try:
            self.world.point(self)
            if self._loop.has_message:
                self._loop.step()
        except Killed:
            self.end("killed")

    def _send(self, message: FromDevice) -> None:
        self.world.point(self)
        self._answer(message)
        self.world.point(self)

    def _make(self, plan: RunPlan, number: int, grant: Callable[[], Any], **facts: Any) -> Worker:
        del plan
        return Worker(self.world.plan, number, grant, **facts, parts=self._parts)

    def _parts(self, plan: RunPlan, number: int, must_leave: Any) -> Parts:
        device: Any = ScriptedDevice(self.world, self, must_leave)
        return Parts(device, device)


class ScriptedDevice:
    """DeviceWorker and executor of a worker: the device follows the script."""

    is_open = given_up = False

    def __init__(self, world: World, process: Process, must_leave: Any) -> None:
        self.world, self.process, self.number, self._must_leave = world, process, process.number, must_leave
        self._needs_check = False

    def begin(self) -> None: ...
    def end_session(self) -> None: ...
    def close(self) -> None: ...
    def await_health_check(self) -> None: ...
    def forget(self) -> None: ...
    def finish(self) -> None: ...
    def outvote(self, others: Iterable[Any]) -> None: ...

    def ended(self, attempt: Attempt) -> None:
        self._needs_check = attempt.cause is Cause.ADB_SERVER

    def has_begun(self, planned: PlannedJob) -> bool:
        return False

    def check(self, *, anew: bool = False) -> str:
        self._need_room()
        self.world.point(self.process)
        if self._needs_check and self.world.script.lacks_server(self.world.points):
            return "no adb server listens"
        self._needs_check = False
        return "" if self._is_well(cost=not anew) else "its health check fails"

    def recover(self, *, outvoted: int = 0) -> str:
        for _ in range(3):
            self.world.point(self.process)
            self._need_room()
            if self._must_leave():
                return "nobody waits for it"
        while self.world.script.lacks_server(self.world.points):
            self.world.point(self.process)
        self._needs_check = False
        return "it does not answer" if self.number in self.world.script.is_unrecoverable else ""

    def run(self, planned: PlannedJob, following: Any, may_begin: Any) -> tuple[tuple[Attempt, ...], tuple[()]]:
        self.world.point(self.process)
        self._need_room()
        serial = self.world.plan.devices[self.number].serial
        verdict, cause = Verdict.PASSED, Cause.NONE
        if self.number in self.world.script.virtual:
            return (Attempt(planned.job.id, Verdict.SKIPPED, Stage.BUILD, "compiled, and not executed"),), ()
        if self.world.script.lacks_server(self.world.points) or int(planned.key) in self.world.script.ends_server:
            verdict, cause = Verdict.INFRA, Cause.ADB_SERVER
        elif self.world.script.losing.get(self.number, 0):
            verdict, cause = Verdict.INFRA, Cause.CONNECTION
            self.world.script.losing[self.number] -= 1
            self.world.script.ailing[self.number] = 1
            if self.world.script.is_lost:
                self.world.script.is_unrecoverable = (self.number,)
        elif self.number in self.world.script.wrong:
            verdict, cause = Verdict.FAILED, Cause.NUMERICS
        elif self.number in self.world.script.refusing:
            verdict, cause = Verdict.FAILED, Cause.REFUSED
        return (Attempt(planned.job.id, verdict, Stage.DONE, "", device=serial, cause=cause),), ()

    def _is_well(self, *, cost: bool) -> bool:
        left = self.world.script.ailing.get(self.number, 0)
        if left and cost:
            self.world.script.ailing[self.number] = left - 1
        return not left and self.number not in self.world.script.is_unrecoverable

    def _need_room(self) -> None:
        if self.world.points in self.world.script.full:
            raise LocalError("this machine: No space left on device", cause="disk", is_general=True)


class Records:
    """Stand-in for the store, with the methods that a run on its own devices calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.devices = SimpleNamespace(health=lambda _: ("suspect", "as the model has it"))

    def record_attempts(self, run_id: str, attempts: Sequence[tuple[Attempt, object]], **_: Any) -> None:
        for attempt, _artifacts in attempts:
            self._world.recorded.setdefault(attempt.job_id, []).append(attempt)


class Stepped(DevicePool):
    """A pool without its thread."""

    def _start(self) -> None:
        """Nothing: the world looks."""


class Front:
    """Shows nothing."""

    def job_ended(self, shown: Any) -> None: ...
    def job_repeated(self, shown: Any) -> None: ...
    def devices(self, running: Any) -> None: ...
