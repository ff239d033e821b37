"""Stubs around the real job source, device runners and pool: device processes, recorder and decision thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from made import job
from stub_run import Quiet
from waiting import all_the_time, until

from farm.base.errors import FarmError
from farm.devices.device import Device
from farm.dispatch import messages
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.local_jobs import LocalJobs
from farm.dispatch.pool.device_pool import DevicePool
from farm.dispatch.request.request import RunPlan
from farm.policy.retries import tried
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import PlannedJob, ShardResult

MOST_STEPS = 2000

Act = "Callable[[StubProcess, RunJob], FromDevice | None]"
"""Ends a job in a device process; None for no answer."""


def name_of(job_id: str) -> str:
    return job_id.partition("/")[2].partition("[")[0]


class Front(Quiet):
    """Front end that keeps which device had which job."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, str]] = []

    def devices(self, running: dict[str, str]) -> None:
        self.shown.append(running)


class StubProcess:
    """Device process that handles one message, or ends one job, a step."""

    def __init__(self, bench: Bench, device: Device) -> None:
        self.bench, self.device, self.is_alive = bench, device, True
        self.grant = messages.Grant(go=False)
        self.running: messages.RunJob | None = None
        self.has_session = False
        """A run has left something on the device."""
        self._queue: deque[messages.ToDevice] = deque()
        self._returns_all = self._is_aborted = False
        self._answer: Callable[[messages.FromDevice], None] = lambda _: None

    def start(self, answer: Callable[[messages.FromDevice], None]) -> None:
        self._answer = answer

    def send(self, *sent: messages.ToDevice) -> None:
        for message in sent if self.is_alive else ():
            if isinstance(message, messages.Grant):
                self.grant, self._returns_all = message, False
            elif isinstance(message, messages.Abort):
                self._is_aborted = True
            else:
                self._queue.append(message)

    @property
    def is_stopped(self) -> bool:
        return False

    def close(self) -> None:
        self.is_alive = False

    def kill(self) -> None:
        self.end("signal 9")

    def end(self, reason: str) -> None:
        """Exit."""
        if self.is_alive:
            self.is_alive = self.has_session = False
            self._answer(messages.ProcessEnded(reason))

    @property
    def may_go(self) -> bool:
        return self.grant.go and not self.grant.is_over

    def step(self) -> bool:
        """End the running job, or handle the next message; return whether there was one."""
        if not self.is_alive:
            return False
        if self.running is not None:
            run, self.running = self.running, None
            broken = messages.JobReturned(number=run.number)
            answer = broken if self._is_aborted else self.bench.act(self, run)
            if answer is not None and self.is_alive:
                self._tell(answer)
            return True
        if not self._queue or (
            isinstance(self._queue[0], messages.RunJob) and self._queue[0].more and len(self._queue) == 1
        ):
            return False
        message = self._queue.popleft()
        if isinstance(message, messages.RunJob):
            if self._returns_all or not self.may_go:
                self._tell(messages.JobReturned(number=message.number))
            else:
                self.running = message
                self._tell(messages.JobBegun(message.number))
                self.bench.ran.append((self.device.serial, message.planned.job.case.name))
        elif isinstance(message, messages.ApplyGrant):
            self._tell(self.bench.settle(self))
        elif isinstance(message, messages.Begin):
            self._is_aborted, self.has_session = False, True
        return True

    def _tell(self, answer: messages.FromDevice) -> None:
        if isinstance(answer, messages.JobReturned):
            self._returns_all = True
            self.has_session = self.has_session and bool(answer.unfit or answer.recovered or answer.halt)
        self._answer(answer)


class StubRecorder:
    """Recorder that takes everything at once, unless a test holds it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.is_held = False
        self.refused: dict[str, FarmError] = {}
        """Refusals of the next result, by name of the job."""
        self.done: list[ShardResult] = []
        self._queue: deque[Callable[[], None]] = deque()

    def result(self, result: ShardResult) -> None:
        def record() -> None:
            refused = self.refused.pop(name_of(result.job_id), None)
            if refused is None:
                self.done.append(result)
            self._bench.jobs.recorded([result], {} if refused is None else {0: refused})

        self._put(record)

    def after(self, _device: str, write: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        def act() -> None:
            write()
            done()

        self._put(act)

    def let_go(self) -> None:
        """Record everything that was held."""
        self.is_held = False
        while self._queue:
            self._queue.popleft()()

    def _put(self, action: Callable[[], None]) -> None:
        self._queue.append(action)
        if not self.is_held:
            self.let_go()


class Bench:
    """A run of `jobs`, which are called SOC:NAME, on devices; the test is the decision thread."""

    def __init__(self, folder: Path, jobs: Sequence[str], devices: Sequence[Device], *, most_failures: int = 0) -> None:
        self.names = [one.partition(":")[2] for one in jobs]
        named = [(name, soc) for soc, _, name in (one.partition(":") for one in jobs)]
        planned = tuple(PlannedJob(job(name, soc, suite="mine"), name, cached=True) for name, soc in named)
        self.plan = RunPlan(
            "run", folder / "run", folder, planned, tuple(devices), {}, folder / "artifacts", timeout_s=1.0
        )
        self.plan.prepare_folder()
        self.front = Front()
        health: Any = SimpleNamespace(devices=SimpleNamespace(health=lambda _: ("", "")))
        self.pool = DevicePool(devices, health, None)
        self.processes: list[StubProcess] = []
        self.ran: list[tuple[str, str]] = []
        """Device and job, in the order in which jobs began."""
        self.acts: dict[str, Any] = {}
        """Act by name of a job, for all its attempts; other jobs pass."""
        self.settles: dict[str, list[messages.JobReturned]] = {}
        """Next answers to ApplyGrant where the device is to be recovered, by serial; others are recovered at once."""
        self._actions: deque[Callable[[], None]] = deque()
        self.jobs = LocalJobs(self.plan, self.pool, self, self.front, most_failures)
        self.recorder: Any = StubRecorder(self)
        self.runners = [
            DeviceRunner(one, self.jobs, self, linger_s=math.inf, rest_s=math.inf) for one in self.plan.devices
        ]

    # Host.

    def process(self, device: Device) -> StubProcess:
        self.processes.append(StubProcess(self, device))
        return self.processes[-1]

    def post(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    # Steps of a test.

    @property
    def notes(self) -> list[str]:
        return self.front.notes

    def begin(self) -> None:
        self.jobs.begin(self.runners, self.recorder, lambda _: None)
        self.decide()

    def decide(self) -> None:
        """Call everything that is posted."""
        while self._actions:
            self._actions.popleft()()

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
        """Wait for other threads; nothing happens in a device process."""
        until(self._decided(condition), lambda: f"{what}; {self.notes}", timeout_s)

    def stays(self, condition: Callable[[], object], seconds: float) -> bool:
        """Return whether something is so all the time for `seconds`; nothing happens in a device process."""
        return all_the_time(self._decided(condition), seconds)

    def _decided(self, condition: Callable[[], object]) -> Callable[[], object]:
        def is_so() -> object:
            self.decide()
            return condition()

        return is_so

    def of(self, number: int) -> StubProcess:
        """Return the newest process of a device."""
        return next(one for one in reversed(self.processes) if one.device is self.plan.devices[number])

    def step(self) -> bool:
        """Let every process do one thing; return whether any did."""
        self.decide()
        did = [one.step() for one in list(self.processes)]
        self.decide()
        return any(did)

    def let_begin(self) -> None:
        """Let every device that has a job begin it."""
        for _ in range(10):
            self.decide()
            for one in list(self.processes):
                if one.running is None:
                    one.step()

    def let_end(self, number: int) -> None:
        """Let the running job of a device end, and the process handle all its messages."""
        process = self.of(number)
        assert process.running is not None
        while process.step():
            self.decide()
            if process.running is not None:
                break
        self.decide()

    def finish(self) -> None:
        """Go on until the run is over. Raises AssertionError for a run that does not end."""
        for _ in range(MOST_STEPS):
            self.step()
            if self.jobs.is_over:
                return
        phases = [(runner.phase, runner.runs) for runner in self.runners]
        raise AssertionError(f"it never ends: {self.notes} {phases} {self.jobs._pending}")

    def run(self) -> None:
        self.begin()
        self.finish()

    # Scripts.

    def act(self, process: StubProcess, run: messages.RunJob) -> messages.FromDevice | None:
        act: Any = self.acts.get(run.planned.job.case.name, passes)
        answer: messages.FromDevice | None = act(process, run)
        return answer

    def settle(self, process: StubProcess) -> messages.JobReturned:
        if not process.grant.recover:
            return messages.JobReturned()
        answers = self.settles.get(process.device.serial)
        return answers.pop(0) if answers else messages.JobReturned(recovered=True)

    # Results.

    def jobs_of(self, number: int) -> list[str]:
        """Return the names of the jobs that began on a device."""
        return [name for serial, name in self.ran if serial == self.plan.devices[number].serial]

    @property
    def began(self) -> list[str]:
        return [name for _, name in self.ran]

    @property
    def ended(self) -> dict[str, str]:
        """Verdict by name of a job, as shown to people; each job ends once."""
        found = {name_of(shown["job_id"]): str(shown["verdict"]) for shown in self.front.ended}
        assert len(found) == len(self.front.ended), self.front.ended
        return found

    @property
    def abandoned(self) -> list[str]:
        return sorted(map(name_of, self.jobs.abandoned))


def attempt_of(process: StubProcess, run: messages.RunJob, verdict: Verdict, cause: Cause = Cause.NONE) -> Attempt:
    bench = process.bench
    return Attempt(
        run.planned.job.id, verdict, Stage.DONE, "", device=process.device.serial, cause=cause,
        started_ms=len(bench.ran), bundle_key=run.planned.key,
    )  # fmt: skip


def passes(process: StubProcess, run: messages.RunJob) -> messages.FromDevice:
    outvoted = tuple(one.device for one in run.planned.history)
    return messages.JobEnded((attempt_of(process, run, Verdict.PASSED),), outvoted=outvoted, number=run.number)


def fails(process: StubProcess, run: messages.RunJob) -> messages.FromDevice:
    """End as failed for good."""
    return messages.JobEnded((attempt_of(process, run, Verdict.FAILED, Cause.NUMERICS),), number=run.number)


def returned(**facts: Any) -> Any:
    """Return an Act that gives the job back."""
    return lambda _, run: messages.JobReturned(**facts, number=run.number)


unfit, given_up = returned(unfit="its health check fails"), returned(given_up="it does not answer")


def fails_here(process: StubProcess, run: messages.RunJob) -> messages.FromDevice:
    """End as failed, for another device to try."""
    attempt = attempt_of(process, run, Verdict.FAILED, Cause.NUMERICS)
    last = msgspec.structs.replace(tried(attempt), device=process.device.id)
    return messages.JobEnded((attempt,), repeat=(*run.planned.history, last), number=run.number)


def fails_while_others(process: StubProcess, run: messages.RunJob) -> messages.FromDevice:
    """End as failed; another device tries next if the grant names one without a try."""
    others = set(process.grant.others) - {one.device for one in run.planned.history}
    return fails_here(process, run) if others else fails(process, run)


def only_on(serial: str, *, otherwise: Any) -> Any:
    """Return an Act that passes on one device."""
    return lambda process, run: (passes if process.device.serial == serial else otherwise)(process, run)


def once(act: Any) -> Any:
    """Return an Act that is `act` the first time and passes from the second time on."""
    acts = [act]
    return lambda process, run: (acts.pop() if acts else passes)(process, run)


def exits(process: StubProcess, run: messages.RunJob) -> messages.FromDevice | None:
    del run
    process.end("signal 11")
    return None


def verdicts(results: Sequence[ShardResult]) -> Mapping[str, list[str]]:
    """Return verdicts by name of the job."""
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(name_of(result.job_id), []).extend(str(one.verdict) for one in result.attempts)
    return found
