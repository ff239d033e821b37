"""Device of one worker: its health and recovery, and the executions of its jobs.

The next job is staged while one runs, and begun while one is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import BundleError, FarmError, LocalError, MissingPackageError, NeedsDeviceError
from farm.base.files import end_of_log
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.device import (
    RECOVERY,
    Event,
    Health,
    HealthEvent,
    HealthMark,
    is_doubtful,
    next_health,
)
from farm.devices.files import local_error
from farm.devices.recovery import StepResult, recover
from farm.dispatch.device_run.artifacts import AttemptArtifacts, FailedFiles
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate, Staged
from farm.policy.retries import Tried, after_rerun, needs_new_session
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.heap import unmeasured
from farm.results.judge import build_failure, not_simulated
from farm.results.outcome import finalize_error, infeasible
from farm.suites.options import frame_setting, late_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from farm.devices.execution.raw import RawResult
    from farm.devices.execution.session import DeviceSession
    from farm.dispatch.request.request import RunPlan
    from farm.store.cluster.records import PlannedJob
    from farm.store.records import ArtifactRecord

    Recordable = tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]


# A person removes files in minutes.
_ROOM_POLL_SECONDS = 2.0
_FULL = "its storage is full: the user who filled it has to free space"
# As many as the rule of farm.devices.device looks at, and more.
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
        """Record of other devices, named by id, that a job which ended the runner there passed here."""
        for one in others:
            reason = f"a job that failed on it passed on {self.device.serial}: {one.reason}"
            self._record(one.device, str(Event.OUTVOTED), Health.SUSPECT, reason)

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
        if health_check is None or not self._plan.await_build(health_check, self._stop):
            return
        self._health_check = None
        with contextlib.suppress(FarmError):
            bundle = load_bundle(self._cache.folder(health_check.key))
            self.run.set_health_check(health_check.job, bundle, self._plan.profile, heap=self._plan.heap)

    def _opened(self, session: DeviceSession) -> None:
        if self._health_check is not None and self._plan.is_built(self._health_check):
            self.await_health_check()
        self.run.prepare(session, self._compiled)

    def _compiled(self) -> tuple[list[Bundle], int]:
        """Return the compiled programs of the run, and how many of the first are the device's share."""
        of_soc = [one for one in (*self._plan.health_checks, *self._plan.jobs) if one.job.target.soc == self.device.soc]
        devices = sum(device.soc == self.device.soc for device in self._plan.devices)
        bundles = []
        for key in dict.fromkeys(one.key for one in of_soc if one.cached):
            with contextlib.suppress(FarmError):
                bundles.append(load_bundle(self._cache.folder(key)))
        return bundles, math.ceil(len(bundles) / devices)

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


_LOG_BYTES = 64 * 1024


class Executor:
    """Executor of jobs on a device. Belongs to one thread, and has its own thread for executions."""

    def __init__(self, plan: RunPlan, device_worker: DeviceWorker) -> None:
        self._plan, self._device_run = plan, device_worker.run
        self._cache = BundleCache(plan.cache_root)
        self._staged: dict[str, Future[Staged]] = {}
        self._begun: dict[str, Future[_JobExecution]] = {}
        self._thread = ThreadPoolExecutor(1, "run")

    def has_begun(self, planned: PlannedJob) -> bool:
        """Return whether a job runs already."""
        return planned.job.id in self._begun

    def run(self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]) -> Recordable:
        """Return the records of a job, and the files of its last attempt.

        `following` is staged meanwhile. After the execution, if `may_begin` returns True, it begins as soon as the
        outputs are here, so that the device need not wait for their judgement.

        Raises LocalError for trouble of this machine, which concerns neither job nor device.
        """
        if why := self._device_run.lacks_heap:
            return (unmeasured(planned.job, planned.key, self._device_run.device.serial, why),), ()
        try:
            attempts, artifacts = self._run(planned, following, may_begin)
            folder = self._plan.folder / "raw" / f"crash-logs-{self._device_run.device.serial}"
            last, logs = self._device_run.keep_crash_logs(attempts[-1], folder)
            return (*attempts[:-1], last), (*artifacts, *logs)
        except OSError as error:
            raise local_error(error) from None

    def _run(self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]) -> Recordable:
        job = planned.job
        try:
            running = self._begun.pop(job.id, None) or self._begin(planned)
            if following is not None and self._plan.is_built(following):
                self._staged[following.job.id] = self._stage(following)
            execution = running.result()
            if following is not None and execution.is_broken:
                # The next job was staged during trouble of the device or its connection.
                self._staged.pop(following.job.id, None)
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),), ()
        except NeedsDeviceError:
            return (not_simulated(job, load_bundle(self._cache.folder(planned.key))),), ()
        except MissingPackageError as error:
            return (build_failure(job, str(error), bundle_key=planned.key),), ()
        except LocalError:
            raise
        except FarmError as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),), ()
        if following is not None and execution.has_answer and self._may_overlap(following) and may_begin():
            self._begun[following.job.id] = self._begin(following)
        refused = self._infeasible(planned, execution)
        attempt, artifacts = self._judged(planned, execution) if refused is None else (refused, ())
        if self._plan.heap or refused is not None:
            return (attempt,), artifacts

        def again() -> tuple[Attempt, RawResult | None]:
            nonlocal artifacts
            staged = self._device_run.stage(execution.staged.workspace.bundle)
            alone = self._execute(planned, staged, alone=True)
            second, artifacts = self._judged(planned, alone)
            return second, alone.raw

        attempts = with_rerun(attempt, execution.raw, again)
        return attempts, artifacts

    def _infeasible(self, planned: PlannedJob, execution: _JobExecution) -> Attempt | None:
        """Return the attempt of a program that was refused for its frame rate alone, None for any other.

        The proof is another execution, in a process of its own: without the demand for real time it is not refused.
        """
        raw, target, bundle = execution.raw, planned.job.target, execution.staged.workspace.bundle
        flags, setting = late_flags(target), frame_setting(target.backend, dict(target.options))
        if raw is None or setting is None or not (flags and was_refused(raw) and (error := finalize_error(raw.stderr))):
            return None
        late = self._execute(planned, self._device_run.stage(bundle), alone=True, flags=flags)
        shutil.rmtree(late.folder, ignore_errors=True)
        if not late.has_answer:
            return None
        attempt = self._device_run.judge(planned.job, bundle, raw)
        shutil.rmtree(execution.folder, ignore_errors=True)
        return infeasible(attempt, setting, error)

    def forget(self) -> None:
        """Drop staged bundles, and the running execution once it has ended."""
        self.finish()
        self._begun.clear()
        self._staged.clear()

    def finish(self) -> None:
        """Wait for what runs: it is kept."""
        for running in self._begun.values():
            running.exception()

    def close(self) -> None:
        """Abort the running execution, and end the thread."""
        self._device_run.abort()
        self.forget()
        self._thread.shutdown()

    def _may_overlap(self, following: PlannedJob) -> bool:
        """Return whether a job may run while another is recorded: not where that would need the device."""
        return following.job.id in self._staged and not self._plan.heap and self._plan.optrace is None

    def _begin(self, planned: PlannedJob) -> Future[_JobExecution]:
        staging = self._staged.pop(planned.job.id, None) or self._stage(planned)
        return self._thread.submit(lambda: self._execute(planned, staging.result(), alone=self._alone(planned)))

    def _alone(self, planned: PlannedJob) -> bool:
        # The peak memory of a process covers all jobs that it ran.
        return self._plan.heap or planned.job.case.generate is not None

    def _execute(
        self, planned: PlannedJob, staged: Staged, *, alone: bool, flags: Mapping[str, str] | None = None
    ) -> _JobExecution:
        """Execute a job; `flags` of the runner replace flags of the target, in a folder with another name."""
        # Two jobs may differ in `/` and `_` alone, and one is executed while the other is judged.
        name = hashlib.sha256(planned.job.id.encode()).hexdigest()
        folder = self._plan.folder / "raw" / (f"{name}.late" if flags else name)
        options = self._device_run.options(planned.job, self._plan)
        if flags:
            options = replace(options, flags={**options.flags, **flags})
        try:
            raw = self._device_run.execute(planned.job.id, staged, folder, options, alone=alone)
            return _JobExecution(staged, folder, raw)
        except LocalError:
            raise
        except (FarmError, ConnectionError, TimeoutError) as error:
            return _JobExecution(staged, folder, None, str(error))

    def _judged(self, planned: PlannedJob, execution: _JobExecution) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        run, raw, bundle = self._device_run, execution.raw, execution.staged.workspace.bundle
        try:
            if raw is None:
                return self._infra(planned, execution.problem), ()
            attempt = run.judge(planned.job, bundle, raw, operators=self._plan.profile.kept)
            return run.keep(attempt, bundle, execution.folder)
        except LocalError:
            raise
        except FarmError as error:
            return self._infra(planned, str(error)), ()
        finally:
            # The result is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(execution.folder, ignore_errors=True)

    def _infra(self, planned: PlannedJob, reason: str) -> Attempt:
        return Attempt(
            planned.job.id,
            Verdict.INFRA,
            Stage.EXECUTE,
            reason,
            device=self._device_run.device.serial,
            bundle_key=planned.key,
            cause=Cause.CONNECTION,
        )

    def _stage(self, planned: PlannedJob) -> Future[Staged]:
        return self._device_run.stage_ahead(lambda: self._bundle(planned))

    def _bundle(self, planned: PlannedJob) -> Bundle:
        if not planned.cached:
            reply = self._plan.read_reply(planned.key)
            if not reply.ok:
                log = end_of_log(self._plan.build_log(planned.key), _LOG_BYTES)
                raise _BuildFailedError(reply.reason, log, infra=reply.infra)
        bundle = load_bundle(self._cache.folder(planned.key))
        bundle.verify()
        soc = self._device_run.device.soc
        if bundle.manifest.soc != soc:
            raise BundleError(f"the bundle is for {bundle.manifest.soc}, the device is a {soc}")
        return bundle


class _JobExecution(NamedTuple):
    """Execution before its judgement."""

    staged: Staged
    folder: Path
    raw: RawResult | None
    """None where the farm itself failed."""
    problem: str = ""
    """Reason of a missing result."""

    @property
    def is_broken(self) -> bool:
        """True if the device or its connection failed."""
        return self.raw is None or bool(self.raw.error)

    @property
    def has_answer(self) -> bool:
        """True for a runner that executed the job and takes the next one."""
        return self.raw is not None and not (self.raw.error or self.raw.process_ended or self.raw.refused)


class _BuildFailedError(Exception):
    def __init__(self, reason: str, log: str, *, infra: bool) -> None:
        self.reason, self.log, self.infra = reason, log, infra
        super().__init__(reason)


def was_refused(raw: RawResult | None) -> bool:
    """Return whether the runner answered a job with an error and did not end."""
    return raw is not None and raw.refused and not raw.process_ended


def with_rerun(
    attempt: Attempt, raw: RawResult | None, again: Callable[[], tuple[Attempt, RawResult | None]]
) -> tuple[Attempt, ...]:
    """Return the attempts of a job on one device, as they are recorded; the last decides.

    `again` executes the job in a process of its own, and is called where the job ended the runner or was refused by it.
    """
    refused = was_refused(raw) and needs_new_session(attempt)
    if not (refused or (raw is not None and raw.process_ended)):
        return (attempt,)
    second, raw_alone = again()
    ended_again = (raw_alone is not None and raw_alone.process_ended) or (refused and was_refused(raw_alone))
    return after_rerun(attempt, second, ended_again=ended_again, refused=refused)
