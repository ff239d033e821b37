"""Process of one device: messages of the dispatcher, and the jobs that it sends, with their results."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec

from farm.base.errors import LocalError
from farm.base.toml_tables import prepare_decoders
from farm.devices.device import HealthEvent
from farm.dispatch import messages
from farm.dispatch.device_link import own_fault
from farm.dispatch.device_run.device_worker import DeviceWorker, Executor
from farm.dispatch.request.request import RunPlan, read_plan
from farm.policy.retries import Tried, as_recorded, classify, is_open, needs_health_check, tried, unfit, with_names
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.cluster.records import PlannedJob

_POLL_SECONDS = 1.0
_ROOM_BYTES = 1 << 20
"""Disk space that an attempt needs, with a reserve."""
_MOST_SERVER_LOSSES = 2
"""After so many ends of the adb server under one job on one device, the job counts as their cause."""


class Parts(NamedTuple):
    """Health and executor of a device."""

    device_worker: DeviceWorker
    executor: Executor


class Worker:
    """Worker of one device of a plan."""

    def __init__(
        self,
        plan: RunPlan,
        number: int,
        grant: Callable[[], messages.Grant],
        *,
        record_health: Callable[[HealthEvent], None],
        is_orphan: Callable[[], bool],
        server_losses: Counter[str] | None = None,
        parts: Callable[[RunPlan, int, Callable[[], bool]], Parts] | None = None,
    ) -> None:
        """`grant` returns the newest grant; `is_orphan` whether the dispatcher has exited.

        `server_losses` counts, by job, how often the adb server ended; `parts` replaces health and executor.
        """
        prepare_decoders()
        self._plan, self._number, self._newest, self._is_orphan = plan, number, grant, is_orphan
        # Other processes know devices by id, and an attempt names its device by serial.
        self._serials = {one.id: one.serial for one in plan.devices}
        self._ids = {one.serial: one.id for one in plan.devices}
        self._local_trouble_s: float | None = None
        """Begin of a lasting fault of this machine, on the monotonic clock; None without one."""
        self._server_losses = Counter[str]() if server_losses is None else server_losses
        self._history: tuple[Tried, ...] = ()
        if parts is None:
            device_worker = DeviceWorker(plan, number, record_health, self._must_leave)
            self._device_worker, self._executor = device_worker, Executor(plan, device_worker)
        else:
            self._device_worker, self._executor = parts(plan, number, self._must_leave)
        self._grant = messages.Grant(go=False)
        if self._may_begin():
            # The session opens while the first job is on its way.
            self._device_worker.begin()

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> messages.JobEnded | messages.JobReturned:
        """Run one job that other devices may have tried. `following` is staged meanwhile.

        A job under which the adb server ends runs again, here, once the health check passes.
        """
        self._history = with_names(planned.history, self._serials)
        while True:
            may_go = self._may_begin()
            try:
                # A job that has begun is finished under every grant.
                returned = None if self._executor.has_begun(planned) else self._get_ready(planned, may_go=may_go)
                done = returned or self._run(planned, following if may_go else None)
                if done is not None:
                    return done
            except LocalError as error:
                attempt = Attempt(planned.job.id, Verdict.INFRA, Stage.EXECUTE, str(error), cause=Cause(error.cause))
                if not error.is_general:
                    return messages.JobEnded((attempt,))
                if not self._has_recovered():
                    return messages.JobReturned(halt=str(error))

    def _get_ready(self, planned: PlannedJob, *, may_go: bool) -> messages.JobReturned | None:
        """Wait until a job can begin; return the reason if it cannot begin here and now."""
        if not may_go:
            # A device is recovered when no job waits for that.
            return messages.JobReturned() if self._grant.recover and not self._is_orphan() else self._left_device()
        self._device_worker.await_health_check()
        if not self._plan.await_build(planned, self._must_leave):
            return self._left_device()
        problem = self._device_worker.check()
        if self._must_leave():
            return self._left_device()
        if not problem:
            return None
        self._executor.forget()
        return self._given_up(problem) if self._device_worker.given_up else messages.JobReturned(unfit=problem)

    def apply_grant(self) -> messages.JobReturned:
        """Recover the device or leave it, as the grant has it, unless jobs may begin."""
        if self._may_begin():
            return messages.JobReturned()
        if not self._grant.recover or self._is_orphan():
            return self._left_device()
        while not self._must_leave():
            try:
                problem = self._device_worker.recover(outvoted=self._grant.outvoted)
            except (LocalError, OSError) as error:
                if not self._has_recovered():
                    return messages.JobReturned(halt=str(error))
                continue
            self._local_trouble_s = None
            if not self._must_leave():
                return self._given_up(problem) if problem else messages.JobReturned(recovered=True)
        return self._left_device()

    def abort(self) -> None:
        """End the running job with an error. Any thread may call it."""
        self._device_worker.run.abort()

    def close(self) -> None:
        """Leave the device as it was found."""
        # A second signal must not interrupt the clean-up that the first one began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._executor.close()
        self._device_worker.close()

    def _may_begin(self) -> bool:
        """Read the grant; end a session of an earlier lease."""
        grant = self._read_grant()
        if grant.fence != self._grant.fence and self._device_worker.is_open:
            self._leave()
        self._grant = grant
        return self._holds(grant)

    def _read_grant(self) -> messages.Grant:
        """Return the newest grant, and show the dispatcher that this process goes on."""
        with contextlib.suppress(OSError):
            os.utime(self._plan.workers / str(self._number))
        return self._newest()

    def _holds(self, grant: messages.Grant) -> bool:
        return grant.go and not grant.is_over and not self._is_orphan()

    def _may_go_on(self) -> bool:
        grant = self._read_grant()
        return self._holds(grant) and grant.fence == self._grant.fence

    def _must_leave(self) -> bool:
        grant = self._read_grant()
        return grant.is_over or not (grant.go or grant.recover) or self._is_orphan()

    def _left_device(self) -> messages.JobReturned:
        self._leave()
        return messages.JobReturned()

    def _given_up(self, problem: str) -> messages.JobReturned:
        self._leave()
        return messages.JobReturned(given_up=problem)

    def _leave(self) -> None:
        self._executor.forget()
        self._device_worker.end_session()

    def _run(self, planned: PlannedJob, following: PlannedJob | None) -> messages.JobEnded | None:
        """Run a job and return its outcome; None if the adb server ended meanwhile."""
        attempts, artifacts = self._executor.run(planned, following, self._may_go_on)
        last = attempts[-1]
        if last.cause is Cause.ADB_SERVER and self._server_losses[last.job_id] < _MOST_SERVER_LOSSES:
            self._server_losses[last.job_id] += 1
            self._device_worker.ended(last)
            return None
        outcome = self._classified(planned, last)
        self._local_trouble_s = None
        attempts = (*attempts[:-1], *outcome.attempts)
        return msgspec.structs.replace(outcome, attempts=attempts, artifacts=artifacts)

    def _has_recovered(self) -> bool:
        """Wait until this machine's disk has room again; return whether another try makes sense."""
        self._executor.forget()
        if self._local_trouble_s is None:
            self._local_trouble_s = time.monotonic()
        while time.monotonic() < self._local_trouble_s + self._plan.health.disk_wait_s:
            time.sleep(_POLL_SECONDS)
            if self._must_leave() or _has_room(self._plan.folder):
                return True
        return False

    def _classified(self, planned: PlannedJob, last: Attempt) -> messages.JobEnded:
        """Return the attempt with a verdict that takes in every device that tried the job."""
        if last.verdict is Verdict.SKIPPED:
            return messages.JobEnded((last,), avoid=self._virtual_devices())
        if not last.device:
            return messages.JobEnded((last,))
        failed_before = planned.failed_before or bool(last.known_issue)
        if needs_health_check(last, failed_before=failed_before):
            self._executor.finish()
            if problem := self._device_worker.check(anew=True):
                last = unfit(last, problem, self._device_worker.run.health_check_cause)
                # The following job was staged in the session that ended with the health check.
                self._executor.forget()
        history = (*self._history, tried(last))
        others = {self._serials.get(id_, id_) for id_ in self._grant.others} - {one.device for one in history}
        decision = classify(history, others=len(others), failed_before=failed_before)
        settled = as_recorded(last, history, decision)
        is_outvote = settled.verdict is Verdict.PASSED
        open_before = [one for one in self._history if is_open(one.cause)] if is_outvote else []
        outvoted = with_names(open_before, self._ids)
        self._device_worker.outvote(outvoted)
        self._device_worker.ended(settled)
        return messages.JobEnded(
            (settled,),
            repeat=self._shared(history, again=decision.again) if decision.repeat or decision.again else (),
            outvoted=tuple(one.device for one in outvoted),
        )

    def _shared(self, history: tuple[Tried, ...], *, again: bool) -> tuple[Tried, ...]:
        """Return a history for other devices."""
        history = (*history[:-1], msgspec.structs.replace(history[-1], again=again))
        return with_names(history, self._ids)

    def _virtual_devices(self) -> tuple[str, ...]:
        """Return the ids of the plan's virtual devices if hardware of the run can execute their jobs."""
        devices, others = self._plan.devices, self._grant.others
        if not any(one.kind == "hardware" and one.id in others for one in devices):
            return ()
        return tuple(one.id for one in devices if one.kind == "virtual")


def _has_room(folder: Path) -> bool:
    """Return whether a file of some size can be written in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


class DeviceLoop:
    """Messages of a device process, from the first to the last."""

    def __init__(self, send: Callable[[messages.FromDevice], None], make: Callable[..., Worker] = Worker) -> None:
        """`send` sends a message to the dispatcher; `make` returns a worker, with the arguments of `Worker`."""
        self._send, self._make = send, make
        self._queue: SimpleQueue[messages.ToDevice] = SimpleQueue()
        self._after: messages.ToDevice | None = None
        """Message behind the running job, which was looked at to stage its bundle."""
        self._grant = messages.Grant(go=False)
        self._returns_all = False
        """Each job is returned until the next grant."""
        self._aborted = self._is_orphan = False
        self._worker: Worker | None = None
        self._server_losses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Ends of the adb server by run: a worker ends when a worker of another run begins."""
        self._plan: RunPlan | None = None
        self._number = 0

    def take(self, message: messages.ToDevice) -> None:
        """Take a message. Called in another thread than `run`."""
        if isinstance(message, messages.Grant):
            self._grant, self._returns_all = message, False
        elif isinstance(message, messages.Abort):
            self._abort()
        elif isinstance(message, messages.End):
            self._grant, self._returns_all = messages.Grant(go=False), True
            self._abort()
            self._queue.put(message)
        else:
            self._queue.put(message)

    def dispatcher_exited(self) -> None:
        """End everything: the dispatcher has exited."""
        self._is_orphan = True
        self.take(messages.End())

    def run(self) -> None:
        """Handle messages until End."""
        try:
            while self.step():
                pass
        finally:
            self._close_worker()

    @property
    def has_message(self) -> bool:
        """True if `step` would find a message."""
        return self._after is not None or not self._queue.empty()

    def step(self) -> bool:
        """Wait for a message and handle it; return False for End."""
        message = self._after or self._queue.get()
        self._after = None
        if isinstance(message, messages.RunJob):
            self._after = self._queue.get() if message.more or not self._queue.empty() else None
            self._run(message, self._after if isinstance(self._after, messages.RunJob) else None)
        elif isinstance(message, messages.ApplyGrant):
            self._apply_grant()
        elif isinstance(message, messages.Begin):
            self._begin(message)
        return not isinstance(message, messages.End)

    def _abort(self) -> None:
        self._aborted = True
        if (worker := self._worker) is not None:
            worker.abort()

    def _begin(self, message: messages.Begin) -> None:
        self._close_worker()
        self._plan, self._number = read_plan(Path(message.plan)), message.number
        self._aborted = False
        if self._grant.go:
            with contextlib.suppress(Exception):
                # The first job reports the fault.
                self._begun(self._plan)

    def _begun(self, plan: RunPlan) -> Worker:
        """Return the worker of the plan; it opens a session ahead of the first job."""
        if self._worker is None:
            self._worker = self._make(
                plan,
                self._number,
                lambda: self._grant,
                record_health=self._record_health,
                is_orphan=lambda: self._is_orphan,
                server_losses=self._server_losses[plan.run_id],
            )
        return self._worker

    def _record_health(self, event: HealthEvent) -> None:
        # The end of a job that the dispatcher broke off is no event of the device.
        if not self._aborted:
            self._send(messages.DeviceEvent(event))

    def _close_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            # A worker that closes ignores SIGTERM, and others follow here.
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _run(self, message: messages.RunJob, following: messages.RunJob | None) -> None:
        if self._returns_all or self._plan is None:
            self._send(messages.JobReturned(number=message.number))
            return
        self._send(messages.JobBegun(message.number))
        done: messages.JobEnded | messages.JobReturned
        try:
            worker = self._begun(self._plan)
            done = worker.run(message.planned, following.planned if following else None)
        except Exception:  # noqa: BLE001 - other jobs may have a result
            text, planned = traceback.format_exc(), message.planned
            why = f"the worker broke down over this job: {text.rstrip().splitlines()[-1]}"
            serial = self._plan.devices[self._number].serial
            done = messages.JobEnded((own_fault(planned.job.id, planned.key, serial, why, text),))
        if self._aborted:
            self._close_worker()
            # The result is dropped.
            done = messages.JobReturned()
        if isinstance(done, messages.JobReturned):
            self._returns_all = True
        self._send(msgspec.structs.replace(done, number=message.number))

    def _apply_grant(self) -> None:
        if self._aborted:
            # A session that was broken off cannot run another job.
            self._close_worker()
        if self._worker is None and self._grant.recover and self._plan is not None:
            self._begun(self._plan)
        returned = messages.JobReturned() if self._worker is None else self._worker.apply_grant()
        self._returns_all = True
        self._send(returned)


def serve(stdin: int, stdout: int) -> None:
    """Handle the messages of the descriptor `stdin` and write answers to `stdout`, until End or its end."""
    # Signals of the terminal are for the dispatcher.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Several threads answer: running and staging.
    lock = threading.Lock()

    def send(message: messages.FromDevice) -> None:
        data = messages.frame(message)
        with lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(stdout, data) :]

    loop = DeviceLoop(send)
    threading.Thread(target=_listen, args=(stdin, loop), daemon=True, name="dispatcher").start()
    with contextlib.suppress(KeyboardInterrupt):
        loop.run()


def _listen(stdin: int, loop: DeviceLoop) -> None:
    try:
        with os.fdopen(stdin, "rb") as pipe:
            for message in messages.read_messages(pipe, messages.ToDevice):
                loop.take(message)
    finally:
        loop.dispatcher_exited()
