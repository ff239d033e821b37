"""Jobs on one device, inside its device process: ask for permission, wait for the bundle, execute, classify."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from farm.base.errors import LocalError
from farm.base.structs import prepare_decoders
from farm.devices.health import HealthEvent
from farm.dispatch.device_run.builds import await_reply
from farm.dispatch.device_run.device_worker import DeviceWorker
from farm.dispatch.device_run.executor import Executor
from farm.dispatch.messages import Grant, JobEnded, JobReturned
from farm.dispatch.request.plan import RunPlan
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
        grant: Callable[[], Grant],
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
        self._device = plan.devices[number]
        self._local_trouble_s: float | None = None
        """Begin of a lasting fault of this machine, on the monotonic clock; None without one."""
        self._server_losses = Counter[str]() if server_losses is None else server_losses
        self._history: tuple[Tried, ...] = ()
        if parts is None:
            device_worker = DeviceWorker(plan, number, record_health, self._must_leave)
            self._device_worker, self._executor = device_worker, Executor(plan, device_worker)
        else:
            self._device_worker, self._executor = parts(plan, number, self._must_leave)
        self._grant = Grant(go=False)
        if self._may_begin():
            # The session opens while the first job is on its way.
            self._device_worker.begin()

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> JobEnded | JobReturned:
        """Run one job that other devices may have tried. `following` is staged meanwhile.

        A job under which the adb server ends runs again, here, once the health check passes.
        """
        # The history names devices by id, and an attempt names its device by serial.
        self._history = with_names(planned.history, {self._device.id: self._device.serial})
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
                    return JobEnded((attempt,))
                if not self._has_recovered():
                    return JobReturned(halt=str(error))

    def _get_ready(self, planned: PlannedJob, *, may_go: bool) -> JobReturned | None:
        """Wait until a job can begin; return the reason if it cannot begin here and now."""
        if not may_go:
            # A device is recovered when no job waits for that.
            return JobReturned() if self._grant.recover and not self._is_orphan() else self._left_device()
        self._device_worker.await_health_check()
        built = self._executor.is_built(planned)
        if not built and await_reply(self._plan.folder, planned.key, self._must_leave) is None:
            return self._left_device()
        problem = self._device_worker.check()
        if self._must_leave():
            return self._left_device()
        if not problem:
            return None
        self._executor.forget()
        return self._given_up(problem) if self._device_worker.given_up else JobReturned(unfit=problem)

    def apply_grant(self) -> JobReturned | None:
        """Recover the device or leave it, as the grant has it; return None if jobs may begin."""
        if self._may_begin():
            return None
        if not self._grant.recover or self._is_orphan():
            return self._left_device()
        while True:
            try:
                problem = self._device_worker.recover(outvoted=self._grant.outvoted)
                break
            except (LocalError, OSError) as error:
                if not self._has_recovered():
                    return JobReturned(halt=str(error))
                if self._must_leave():
                    return self._left_device()
        self._local_trouble_s = None
        if self._must_leave():
            return self._left_device()
        return self._given_up(problem) if problem else JobReturned(recovered=True)

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

    def _read_grant(self) -> Grant:
        """Return the newest grant, and show the dispatcher that this process goes on."""
        with contextlib.suppress(OSError):
            os.utime(self._plan.workers / str(self._number))
        return self._newest()

    def _holds(self, grant: Grant) -> bool:
        return grant.go and not grant.is_over and not self._is_orphan()

    def _may_go_on(self) -> bool:
        grant = self._read_grant()
        return self._holds(grant) and grant.fence == self._grant.fence

    def _must_leave(self) -> bool:
        grant = self._read_grant()
        return grant.is_over or not (grant.go or grant.recover) or self._is_orphan()

    def _left_device(self) -> JobReturned:
        self._leave()
        return JobReturned(off=True)

    def _given_up(self, problem: str) -> JobReturned:
        self._leave()
        return JobReturned(given_up=problem)

    def _leave(self) -> None:
        self._executor.forget()
        self._device_worker.end_session()

    def _run(self, planned: PlannedJob, following: PlannedJob | None) -> JobEnded | None:
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

    def _classified(self, planned: PlannedJob, last: Attempt) -> JobEnded:
        """Return the attempt with a verdict that takes in every device that tried the job."""
        if last.verdict is Verdict.SKIPPED:
            return JobEnded((last,), avoid=self._virtual_devices())
        if not last.device:
            return JobEnded((last,))
        failed_before = planned.failed_before or bool(last.known_issue)
        if needs_health_check(last, failed_before=failed_before):
            self._executor.finish()
            if problem := self._device_worker.check(anew=True):
                last = unfit(last, problem, self._device_worker.run.health_check_cause)
                # The following job was staged in the session that ended with the health check.
                self._executor.forget()
        history = (*self._history, tried(last))
        devices = {one.device for one in history}
        decision = classify(history, others=len(set(self._grant.others) - devices), failed_before=failed_before)
        settled = as_recorded(last, history, decision)
        is_outvote = settled.verdict is Verdict.PASSED
        outvoted = [one for one in self._history if is_open(one.cause)] if is_outvote else []
        self._device_worker.outvote(outvoted)
        self._device_worker.ended(settled)
        return JobEnded(
            (settled,),
            repeat=self._shared(history, again=decision.again) if decision.repeat or decision.again else (),
            outvoted=tuple(one.device for one in outvoted),
        )

    def _shared(self, history: tuple[Tried, ...], *, again: bool) -> tuple[Tried, ...]:
        """Return a history for other devices: virtual devices of two hosts may have one serial."""
        history = (*history[:-1], msgspec.structs.replace(history[-1], again=again))
        return with_names(history, {self._device.serial: self._device.id})

    def _virtual_devices(self) -> tuple[str, ...]:
        """Return the ids of the plan's virtual devices if hardware of the run can execute their jobs."""
        devices, others = self._plan.devices, self._grant.others
        if not any(one.kind == "hardware" and one.serial in others for one in devices):
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
