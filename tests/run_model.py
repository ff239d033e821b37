"""A run in one thread: real scheduler, session, controller, pool, grants and workers, over scripted devices.

What is a process elsewhere is a `Process` here, which does one thing at a time; every moment at which it could be
killed is a `point`. Time is what `World.sleep` says.
"""
# ruff: noqa: ARG002, ARG005 - stand-ins take what the real ones take

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

from farm.devices.device import AdbAddress, Device
from farm.errors import LocalError
from farm.pool.device_pool import DevicePool
from farm.pool.worker_grant import write_grant
from farm.request.plan import PlannedJob, RunPlan
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.run.controller import Controller
from farm.run.plugin import SHORT_KEY, JobReport, properties_of, pytest_report_from_serializable
from farm.run.scheduler import IDLE, DeviceScheduling
from farm.run.worker import Outfit, Worker
from farm.run.workers import WorkerSession
from farm.store.view import JobView
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Every step lets each process do one thing; a run of six jobs takes about 40.
MOST_STEPS = 600


class Killed(BaseException):
    """Ends what a process does."""


@dataclass
class Script:
    """What happens in a run, by the number of the point at which it happens."""

    kills: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Devices whose workers are killed."""
    full: range = range(0)
    """Between these points this machine's disk is full."""
    ailing: dict[int, int] = field(default_factory=dict)
    """How often a device fails before it is well again, by its number."""
    hopeless: tuple[int, ...] = ()
    """Devices that cannot be brought back."""
    wrong: tuple[int, ...] = ()
    """Devices that compute wrong numbers, although their canary passes."""
    refusing: tuple[int, ...] = ()
    """Devices that refuse every program, although their canary passes."""
    virtual: tuple[int, ...] = ()
    """Devices that are virtual: jobs are such as only others run."""
    no_server: tuple[range, ...] = ()
    """Between these points no adb server listens."""
    ends_server: tuple[int, ...] = ()
    """Jobs that end the adb server, by their number."""

    def lacks_server(self, point: int) -> bool:
        """Return whether no adb server listens at a point."""
        return any(point in away for away in self.no_server)


class World:
    """One run."""

    def __init__(self, folder: Path, script: Script, *, devices: int = 2, jobs: int = 6) -> None:
        self.script, self.points, self.now_s = script, 0, 0.0
        self.notes: list[str] = []
        self.recorded: dict[str, list[Attempt]] = {}
        self.is_sleeping = False
        case = Case("mine", "add", "torch.nn:ReLU", (InputSpec((1,)),))
        planned = [
            PlannedJob(Job(case, Target("SM8650", "htp", "8a8w", (("soc_rev", str(n)),))), str(n), cached=True)
            for n in range(jobs)
        ]
        fleet = [_device(f"device-{n}", "virtual" if n in script.virtual else "hardware") for n in range(devices)]
        self.plan = RunPlan(
            "run", folder, folder, tuple(planned), tuple(fleet),
            {}, 1, 0, 1.0, folder,
        )  # fmt: skip
        self.plan.prepare_folder()
        store: Any = Records(self)
        front: Any = Front(self.notes)
        self.pool = Stepped(self.plan.devices, store, None, self.notes.append, self.leave)
        self.controller = Controller(self.plan, front, store, self.pool)
        self.pool.begin(folder)
        self.session = WorkerSession(pytest_config(self.controller), self.controller._workers)
        self.session.nodemanager = Nodes(self)
        self.session._session = SimpleNamespace(testscollected=0)
        self.processes: list[Process] = []

    def leave(self, folder: Path, number: int, grant: Any) -> None:
        """Write a grant, where there is room."""
        if self.points in self.script.full:
            raise OSError(28, "No space left on device")
        write_grant(folder, number, grant)

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
        """Let time pass for what waits; everything else goes on."""
        self.now_s += seconds
        if not self.is_sleeping:
            self.is_sleeping = True
            self.pool.look()
            self.is_sleeping = False
        self.points += 1

    def run(self) -> int:
        """Run to the end and return how many steps that took. Raises AssertionError for a run that does not end."""
        self.session.sched = self.controller.pytest_xdist_make_scheduler()
        self.session.shouldstop = False
        self.session._start_missing()
        for step in range(MOST_STEPS):
            while not self.session.queue.empty():
                name, arguments = self.session.queue.get()
                getattr(self.session, f"worker_{name}")(**arguments)
                self.session.look()
            for process in self.processes:
                process.step()
            self.now_s += 0.25
            self.pool.look()
            self.session.look()
            if self.session.session_finished:
                return step
        raise AssertionError(f"it never ends: {self.notes} {self.session.sched._given} {self.pool._unfit}")

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of every job that has one about its code."""
        return {
            job: attempts[-1].verdict
            for job, attempts in self.recorded.items()
            if attempts[-1].verdict is not Verdict.INFRA
        }


class Process:
    """A worker process, as xdist's session sees it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.is_alive = world, number, True
        self.gateway = SimpleNamespace(id=f"gw{len(world.processes)}", spec=None)
        self.workerinput: dict[str, Any] = {}
        self.workeroutput = {"exitstatus": 0, "shouldfail": "", "shouldstop": ""}
        self.shutting_down = False
        self._stages = deque(["workerready", "collectionfinish"])
        self._items: deque[int] = deque()
        self._worker: Worker | None = None

    def send_runtest_some(self, indices: Iterable[int]) -> None:
        self._items.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    def tell(self, event: str, **facts: Any) -> None:
        self.world.session.queue.put((event, {"node": self, **facts}))

    def end(self, reason: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self.tell("errordown", error=reason)

    def step(self) -> None:
        """Do the next thing, if there is any."""
        if not self.is_alive:
            return
        try:
            self.world.point(self)
            if self._stages:
                stage = self._stages.popleft()
                about = {"version_info": (3, 11, 0), "executable": "", "sysplatform": "linux", "cwd": ""}
                ids = {"ids": self.items} if stage == "collectionfinish" else {"workerinfo": about}
                self.tell(stage, **ids)
            elif len(self._items) > 1 or (self._items and self.shutting_down):
                self._do(self._items.popleft())
            elif self.shutting_down:
                self.world.point(self)
                self.is_alive = False
                self.tell("workerfinished")
        except Killed:
            self.end("killed")

    @property
    def items(self) -> list[str]:
        return [*(planned.job.id for planned in self.world.plan.jobs), IDLE]

    def _do(self, index: int) -> None:
        if self._worker is None:
            self._worker = Worker(self.world.plan, self.number, os.getppid(), self._outfit)
        item = self.items[index]
        done = self._worker.look() if item == IDLE else self._worker.run(self.world.plan.jobs[index])
        self.world.point(self)
        properties = properties_of(done) if done is not None else []
        if self.number % 2:
            # A worker without a session of pytest's: the item is done with its report, or without one.
            job = JobReport(index, "" if item == IDLE else item, 0.0, properties)
            short = pytest_report_from_serializable({SHORT_KEY: msgspec.json.encode(job).decode()})
            self.tell("testreport", rep=short) if properties else self._complete(index)
            return
        report = pytest.TestReport(item, ("", None, ""), {}, "passed", None, "call")
        report.user_properties = properties
        self.tell("testreport", rep=report)
        self.world.point(self)
        self._complete(index)

    def _complete(self, index: int) -> None:
        self.tell("runtest_protocol_complete", item_index=index, duration=0.0)

    def _outfit(self, plan: RunPlan, number: int, unwanted: Any) -> Outfit:
        device: Any = ScriptedDevice(self.world, self, unwanted)
        store: Any = Records(self.world, self)
        return Outfit(store, device, device)


class ScriptedDevice:
    """DeviceWorker and executor of a worker: the device does what the script says."""

    is_open = given_up = False

    def __init__(self, world: World, process: Process, unwanted: Any) -> None:
        self.world, self.process, self.number, self._unwanted = world, process, process.number, unwanted
        self._doubt = False

    def begin(self) -> None: ...
    def close(self) -> None: ...
    def shut(self) -> None: ...
    def await_canary(self) -> None: ...
    def forget(self) -> None: ...
    def finish(self) -> None: ...
    def outvote(self, others: Iterable[Any]) -> None: ...

    def ended(self, attempt: Attempt) -> None:
        self._doubt = attempt.cause is Cause.ADB_SERVER

    def has_begun(self, planned: PlannedJob) -> bool:
        return False

    def is_built(self, planned: PlannedJob) -> bool:
        return True

    def check(self, *, anew: bool = False) -> str:
        self._need_room()
        self.world.point(self.process)
        if self._doubt and self.world.script.lacks_server(self.world.points):
            return "no adb server listens"
        self._doubt = False
        return "" if self._is_well(cost=not anew) else "its canary fails"

    def recover(self, *, outvoted: int = 0) -> str:
        for _ in range(3):
            self.world.point(self.process)
            self._need_room()
            if self._unwanted():
                return "nobody waits for it"
        while self.world.script.lacks_server(self.world.points):
            self.world.point(self.process)
        self._doubt = False
        return "it does not answer" if self.number in self.world.script.hopeless else ""

    def run(self, planned: PlannedJob, following: Any, may_begin: Any) -> tuple[tuple[Attempt, ...], tuple[()]]:
        self.world.point(self.process)
        self._need_room()
        serial = self.world.plan.devices[self.number].serial
        verdict, cause = Verdict.PASSED, Cause.NONE
        if self.number in self.world.script.virtual:
            return (Attempt(planned.job.id, Verdict.SKIPPED, Stage.BUILD, "compiled, and not executed"),), ()
        if self.world.script.lacks_server(self.world.points) or int(planned.key) in self.world.script.ends_server:
            verdict, cause = Verdict.INFRA, Cause.ADB_SERVER
        elif self.number in self.world.script.wrong:
            verdict, cause = Verdict.FAILED, Cause.NUMERICS
        elif self.number in self.world.script.refusing:
            verdict, cause = Verdict.FAILED, Cause.REFUSED
        return (Attempt(planned.job.id, verdict, Stage.DONE, "", device=serial, cause=cause),), ()

    def _is_well(self, *, cost: bool) -> bool:
        left = self.world.script.ailing.get(self.number, 0)
        if left and cost:
            self.world.script.ailing[self.number] = left - 1
        return not left and self.number not in self.world.script.hopeless

    def _need_room(self) -> None:
        if self.world.points in self.world.script.full:
            raise LocalError("this machine: No space left on device", cause="disk", is_general=True)


class Records:
    """The store, for what a run on devices of its own asks of it."""

    def __init__(self, world: World, process: Process | None = None) -> None:
        self._world, self._process = world, process
        self.runs = SimpleNamespace(view=self._view)
        self.devices = SimpleNamespace(health=lambda ids: dict.fromkeys(ids, ("suspect", "as the model has it")))

    def record_attempt(self, run_id: str, attempt: Attempt, **_: Any) -> None:
        if self._process is not None:
            self._world.point(self._process)
        self._world.recorded.setdefault(attempt.job_id, []).append(attempt)
        if self._process is not None:
            self._world.point(self._process)

    def _view(self, run_id: str) -> Any:
        jobs = [
            JobView(job, "suite", job, "SM8650", "htp", "8a8w", tuple(attempts))
            for job, attempts in self._world.recorded.items()
        ]
        return SimpleNamespace(jobs=jobs)

    def close(self) -> None: ...


class Nodes:
    """xdist's manager of workers; one may be killed while it starts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.specs = [SimpleNamespace(id=None)]
        self.group = SimpleNamespace(allocate_id=lambda spec: None)

    def setup_node(self, spec: Any, put: Any) -> Process:
        world = self._world
        process = Process(world, -1)
        world.processes.append(process)
        world.controller.pytest_configure_node(process)
        process.number = process.workerinput["farm_device"]
        try:
            world.point(process)
        except Killed:
            process.is_alive = False
            raise EOFError("couldn't load message header, expected 9 bytes, got 0") from None
        return process


class Stepped(DevicePool):
    """A pool without its thread."""

    def _start(self) -> None:
        """Nothing: the world minds it."""


class Front:
    """Remembers notes."""

    def __init__(self, notes: list[str]) -> None:
        self.note = notes.append

    def job_ended(self, shown: Any) -> None: ...
    def job_repeated(self, shown: Any) -> None: ...
    def devices(self, running: Any) -> None: ...


def pytest_config(controller: Controller) -> Any:
    """What xdist's session asks of pytest, with the hooks of `controller`."""

    def nothing(**_: Any) -> None: ...

    def handle_crash(crashitem: str, report: Any, sched: DeviceScheduling) -> None:
        controller.pytest_handlecrashitem(crashitem, report, sched)

    hook = SimpleNamespace(
        pytest_testnodeready=nothing,
        pytest_xdist_setupnodes=nothing,
        pytest_xdist_node_collection_finished=nothing,
        pytest_testnodedown=lambda node, error: controller.pytest_testnodedown(node, error),
        pytest_handlecrashitem=handle_crash,
        pytest_runtest_logreport=lambda report: controller.pytest_runtest_logreport(report),
    )
    return SimpleNamespace(
        hook=hook,
        option=SimpleNamespace(debug=False, numprocesses=2, maxworkerrestart=None),
        getvalue=lambda name: 0,
        getoption=lambda name, default=None: default,
        pluginmanager=SimpleNamespace(getplugin=lambda name: None, register=lambda *_: None),
    )


def _device(serial: str, kind: Literal["virtual", "hardware"]) -> Device:
    return Device(serial=serial, soc="SM8650", kind=kind, build="", address=AdbAddress(5037), product="")
