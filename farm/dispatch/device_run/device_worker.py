"""The device of one worker: its health, the health check, and bringing it back."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.health import RECOVERY, Event, Health, HealthEvent, HealthMark, is_doubtful, next_health
from farm.devices.recovery import StepResult, recover
from farm.dispatch.device_run.artifacts import AttemptArtifacts, FailedFiles
from farm.dispatch.device_run.builds import await_reply, has_reply
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate
from farm.results.attempt import Attempt, Cause, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farm.devices.execution.session import DeviceSession
    from farm.dispatch.request.plan import RunPlan
    from farm.policy.retries import Tried
    from farm.store.cluster.records import PlannedJob

# A person removes files in minutes.
_ROOM_POLL_SECONDS = 2.0
_FULL = "its storage is full: the user who filled it has to free space"
# As many as the rule of farm.devices.health looks at, and more.
_MARKS = 20


class DeviceWorker:
    """Health of a device process's device. Belongs to one thread."""

    def __init__(
        self, plan: RunPlan, number: int, record: Callable[[HealthEvent], None], stop: Callable[[], bool]
    ) -> None:
        """Take `record`, which records a health event of a device and raises FarmError on failure.

        `stop` returns whether waits for this device should end, healthy or not."""
        self._plan, self._record_event, self._stop = plan, record, stop
        self.device = plan.devices[number]
        self._cache = BundleCache(plan.cache_root)
        self._health_check = next((c for c in plan.health_checks if c.job.target.soc == self.device.soc), None)
        self._needs_check = True
        self._health, self._reason, self._marks = Health.HEALTHY, "", list[HealthMark]()
        self._outvoted = 0
        self.run = DeviceRun(
            self.device,
            plan.runtimes[self.device.serial],
            plan.run_id,
            takeover=plan.leased,
            gate=HeatGate(plan.health, stop=stop),
            artifacts=AttemptArtifacts(
                plan.artifact_root,
                plan.profile,
                optrace=plan.optrace,
                failed=FailedFiles(plan.failures, plan.folder / "failures"),
            ),
            pipelined=True,
            opened=self._opened,
        )

    @property
    def is_open(self) -> bool:
        """True if files of this run may be on the device."""
        return self.run.is_open

    def begin(self) -> None:
        """Begin a session ahead of the first job; `check` reports a failure."""
        with contextlib.suppress(FarmError):
            _ = self.run.session

    def ended(self, attempt: Attempt) -> None:
        """Note how an attempt ended: where the device, or its cable, may be at fault, its health check runs next."""
        if attempt.verdict is Verdict.INFRA:
            cause = Cause.LEASE if self.device.until_s and self.run.session_ended else attempt.cause
            self._mark(Event.INFRA, attempt.reason, str(cause))
            # No device's fault, and the next job would fare no better before the server is back.
            self._needs_check = self._needs_check or attempt.cause is Cause.ADB_SERVER
        else:
            self._mark(Event.JOB_DONE)

    def outvote(self, others: Iterable[Tried]) -> None:
        """Record of other devices that a job which ended the runner there passed here."""
        ids = {device.serial: device.id for device in self._plan.devices}
        for one in others:
            reason = f"a job that failed on it passed on {self.device.serial}: {one.reason}"
            # Devices of other hosts are known by their ids.
            self._record(ids.get(one.device, one.device), str(Event.OUTVOTED), Health.SUSPECT, reason)

    def check(self, *, anew: bool = False) -> str:
        """Return an empty text for a device fit for measurements, else its problem.

        Called before every job: the health check runs at first, after every doubt, and with `anew`. Raises LocalError.
        """
        self._needs_check = self._needs_check or anew
        if self.given_up:
            return self._reason
        if not self._needs_check:
            return ""
        problem = self._probe()
        if problem:
            self._mark(Event.CHECK_FAILED, problem, self.run.silence_cause())
        else:
            self._mark(Event.CHECK_PASSED)
        self._needs_check = bool(problem)
        return problem

    @property
    def given_up(self) -> bool:
        """True once the run has given up the device."""
        return self._health is Health.QUARANTINED

    def recover(self, *, outvoted: int = 0) -> str:
        """Bring the device back, step by step; return an empty text when its health check passes, else why it does not.

        `outvoted` is how many of the run's jobs failed on it and passed elsewhere. Raises LocalError.
        """
        for _ in range(self._outvoted, outvoted):
            self._mark(Event.OUTVOTED, "jobs that fail on it pass on other devices")
        self._outvoted = max(self._outvoted, outvoted)
        if self.given_up:
            return self._reason
        problem = recover(
            self.device,
            find_problem=self._probe,
            log=self._log_step,
            stop=lambda: self._stop() or self.device.is_over,
            is_unrecoverable=lambda: self.run.is_full or self.run.lacks_runtime,
        ).problem
        if self.run.is_full:
            problem = self._await_room(problem)
        if problem and self._stop():
            return problem
        if problem and self.run.session_ended:
            return f"its rented session has ended: {problem}"
        if problem:
            self._mark(Event.GAVE_UP, problem, self.run.silence_cause())
        else:
            self._mark(Event.RECOVERED)
            self._mark(Event.CHECK_PASSED)
            self._needs_check = False
        return problem

    def _await_room(self, problem: str) -> str:
        """Wait until space is free on the device, as long as for space on this machine.

        Returns the problem of its health check, empty for none.
        """
        deadline = time.monotonic() + self._plan.health.disk_wait_s
        while self.run.is_full and not self._stop() and time.monotonic() < deadline:
            time.sleep(_ROOM_POLL_SECONDS)
            problem = self._probe()
        return f"{_FULL}: {problem}" if self.run.is_full else problem

    def end_session(self) -> None:
        """Leave the device as it was found."""
        self.run.end_session()
        self._needs_check = True

    def close(self) -> None:
        """Close for good."""
        self.run.close()

    def await_health_check(self) -> None:
        """Wait for the health check's program, once: it belongs into the runner's start."""
        health_check = self._health_check
        if health_check is None or not (
            self._is_built(health_check) or await_reply(self._plan.folder, health_check.key, self._stop) is not None
        ):
            return
        self._health_check = None
        with contextlib.suppress(FarmError):
            bundle = load_bundle(self._cache.folder(health_check.key))
            self.run.set_health_check(health_check.job, bundle, self._plan.profile, heap=self._plan.heap)

    def _opened(self, session: DeviceSession) -> None:
        if self._health_check is not None and self._is_built(self._health_check):
            self.await_health_check()
        self.run.prepare(session, self._compiled)

    def _compiled(self) -> list[Bundle]:
        """Return what can be brought to the device already: as many of the first jobs as are its share of the run."""
        of_soc = [one for one in (*self._plan.health_checks, *self._plan.jobs) if one.job.target.soc == self.device.soc]
        devices = sum(device.soc == self.device.soc for device in self._plan.devices)
        keys = dict.fromkeys(one.key for one in of_soc[: math.ceil(len(of_soc) / devices)] if one.cached)
        bundles = []
        for key in keys:
            with contextlib.suppress(FarmError):
                bundles.append(load_bundle(self._cache.folder(key)))
        return bundles

    def _is_built(self, planned: PlannedJob) -> bool:
        return planned.cached or has_reply(self._plan.folder, planned.key)

    def _probe(self) -> str:
        """Return the problem of the device, empty for none."""
        problem = self.run.probe(self._plan.folder / "raw" / f"health_check-{self.device.serial}")
        if problem:
            # All objects of farm leave a full device to free space.
            self.run.end_session(free=self.run.is_full)
        return problem

    def _mark(self, event: Event, reason: str = "", cause: str = "") -> None:
        mark = HealthMark(event, cause, reason)
        before = self._health
        self._health, why = next_health(before, self._marks, mark)
        self._reason = why or self._reason
        self._marks = [*self._marks, mark][-_MARKS:]
        self._needs_check = self._needs_check or is_doubtful(mark)
        # The device that outvoted this one has recorded the event.
        if event not in (Event.JOB_DONE, Event.OUTVOTED) or self._health is not before:
            latency_ns = self.run.health_check_latency_ns if event is Event.CHECK_PASSED else ()
            self._record(self.device.id, str(event), self._health, why or reason, latency_ns)

    def _log_step(self, step: StepResult) -> None:
        result = f"{step.step}: {step.problem or 'it answers again'}"
        if step.output:
            result += f"; the command printed: {step.output}"
        self._record(self.device.id, RECOVERY, self._health, result)

    def _record(self, device: str, event: str, state: Health, reason: str, latency_ns: tuple[float, ...] = ()) -> None:
        """Record an event of a device that others use as well."""
        if not self._plan.leased:
            return
        with contextlib.suppress(FarmError):
            self._record_event(HealthEvent(device, event, str(state), reason, {"run": self._plan.run_id}, latency_ns))
