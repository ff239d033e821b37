"""The device of one worker: its session, and whether it is fit to measure on."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from farm.bundles.bundle import load_bundle
from farm.bundles.cache import BundleCache
from farm.device_run.builds import await_reply, has_reply
from farm.device_run.canary import ANCHORED
from farm.devices.connect import open_transport
from farm.devices.gates import check, wait_until_cool
from farm.devices.health import Event, Health, HealthMark, is_doubtful, next_health
from farm.devices.hosts import server_answers
from farm.devices.local.files import local_error
from farm.devices.recovery import recover
from farm.devices.status import read_status
from farm.errors import DeviceError, FarmError, LocalError
from farm.execution.session import DeviceSession, RunnerOptions
from farm.results.attempt import Attempt, Cause, Verdict
from farm.results.judge import judge
from farm.store.leases.registry import HealthEvent
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from farm.bundles.bundle import Bundle
    from farm.devices.recovery import StepResult
    from farm.devices.transport import Transport
    from farm.execution.workspace import Workspace
    from farm.request.plan import PlannedJob, RunPlan
    from farm.results.blame import Tried
    from farm.store.store import Store

# Enough for a median; together they take less than one job.
_CANARY_INFERENCES = 10
_CANARY_SECONDS = 60.0
# A battery and a case change by less than a degree meanwhile.
_STATUS_SECONDS = 15.0
# As many as the rule of farm.devices.health looks at, and more.
_MARKS = 20


class DeviceWorker:
    """Belongs to one thread; what it stages is staged in another."""

    def __init__(self, plan: RunPlan, number: int, store: Store, stop: Callable[[], bool]) -> None:
        """`stop` tells that nobody waits for this device any more, well or not."""
        self._plan, self._store, self._stop = plan, store, stop
        self.device = plan.devices[number]
        self._runtime = plan.runtimes[self.device.serial]
        self._cache = BundleCache(plan.cache_root)
        self._canary = next((c for c in plan.canaries if c.job.target.soc == self.device.soc), None)
        self._canary_bundle: Bundle | None = None
        self.transport: Transport = open_transport(self.device)
        self._session: DeviceSession | None = None
        self._sessions = 0
        self._doubt = True
        self._health, self._reason, self._marks = Health.HEALTHY, "", list[HealthMark]()
        self._latency: tuple[float, ...] = ()
        self._status_at = float("-inf")
        self._too_hot = ""
        self._outvoted = 0
        # One thread: the cable is one, and what is staged first is needed first.
        self._aside = ThreadPoolExecutor(1, "stage")

    @property
    def is_open(self) -> bool:
        """Whether there is anything of ours on the device."""
        return self._session is not None

    @property
    def session(self) -> DeviceSession:
        """The session, begun when there is none."""
        self.begin()
        assert self._session is not None  # noqa: S101 - for the type
        return self._session

    def begin(self) -> None:
        """Begin a session, when there is none; what a former owner of a leased device left is ended and removed."""
        if self._session is not None:
            return
        self._sessions += 1
        # With a number, as a session must not meet what one before it left.
        name = f"{self._plan.run_id}.{self._sessions}"
        leased = self._plan.leased
        self._session = DeviceSession(self.transport, self._runtime, name, self.device.serial, takeover=leased)
        self._keep_loaded()
        if self._canary is not None and self._is_built(self._canary):
            self.await_canary()
        self._aside.submit(self._prepare, self._session)

    def stage(self, action: Callable[[], Workspace]) -> Future[Workspace]:
        """Stage something while a job may run."""
        return self._aside.submit(action)

    def ended(self, attempt: Attempt) -> None:
        """Note how an attempt ended: where the device, or its cable, may be to blame, the canary has to tell."""
        if attempt.verdict is Verdict.INFRA:
            self._mark(Event.INFRA, attempt.reason, str(attempt.cause))
            # No device's fault, and the next job would fare no better before the server is back.
            self._doubt = self._doubt or attempt.cause is Cause.ADB_SERVER
        else:
            self._mark(Event.JOB_DONE)

    def outvote(self, others: Iterable[Tried]) -> None:
        """Let the store know of devices on which a job ended the runner that passed here."""
        ids = {device.serial: device.id for device in self._plan.devices}
        for one in others:
            reason = f"a job that failed on it passed on {self.device.serial}: {one.reason}"
            self._record(ids[one.device], str(Event.OUTVOTED), Health.SUSPECT, reason)

    def check(self, *, anew: bool = False) -> str:
        """Return an empty text when the device may be measured on, else what is wrong with it.

        Asked before every job: the canary runs first of all, and after every doubt, or `anew`. Raises LocalError.
        """
        self._doubt = self._doubt or anew
        if self._health is Health.QUARANTINED:
            return self._reason
        if not self._doubt:
            return ""
        problem = self._try()
        if problem:
            self._mark(Event.CANARY_FAILED, problem, self._cause_of_silence())
        else:
            self._mark(Event.CANARY_OK)
        self._doubt = bool(problem)
        return problem

    @property
    def given_up(self) -> bool:
        """Whether the device is of no use any more."""
        return self._health is Health.QUARANTINED

    def mend(self, *, outvoted: int = 0) -> str:
        """Bring the device back, step by step; return an empty text when its canary passes, else why it does not.

        `outvoted` is how many of the run's jobs failed on it and passed elsewhere. Raises LocalError.
        """
        for _ in range(self._outvoted, outvoted):
            self._mark(Event.OUTVOTED, "jobs that fail on it pass on other devices")
        self._outvoted = max(self._outvoted, outvoted)
        if self._health is Health.QUARANTINED:
            return self._reason
        mended = recover(self.device, works=self._try, log=self._log_step, stop=self._stop)
        if mended.problem and self._stop():
            return mended.problem
        if mended.problem:
            self._mark(Event.GAVE_UP, mended.problem, self._cause_of_silence())
        else:
            self._mark(Event.RECOVERED)
            self._mark(Event.CANARY_OK)
            self._doubt = False
        return mended.problem

    def _cause_of_silence(self) -> str:
        """Return the cause of a failure that is not the device's: nobody can reach it without its adb server."""
        return "" if server_answers(self.device) else str(Cause.ADB_SERVER)

    def gate(self) -> str:
        """Wait until the device is cool and charged enough, and return what a reader of the numbers should know."""
        if time.monotonic() < self._status_at + _STATUS_SECONDS:
            return self._too_hot
        transport, limits = self.transport, self._plan.health
        try:
            if not check(read_status(transport, os=self.device.os), limits):
                self._too_hot = ""
                return ""
            if self._too_hot:
                # Waiting has not helped: nor would it before every job.
                limits = msgspec.structs.replace(limits, gate_wait_s=0.0)
            note = wait_until_cool(transport, self.device.os, limits, sleep=time.sleep, stop=self._stop)
            self._too_hot = note if check(read_status(transport, os=self.device.os), limits) else ""
        except DeviceError:
            # Its job will tell.
            return ""
        finally:
            self._status_at = time.monotonic()
        return note

    def break_off(self) -> None:
        """Let nobody wait for what runs."""
        if self._session is not None:
            self._session.break_off()

    def close(self) -> None:
        """Leave the device as it was found."""
        self._end_session()
        self._doubt = True

    def shut(self) -> None:
        """Close for good."""
        self._aside.shutdown(cancel_futures=True)
        if self._session is not None:
            self._session.close()
        self.transport.close()

    def await_canary(self) -> None:
        """Wait for the canary's program, once: it belongs into the runner's start."""
        canary = self._canary
        if canary is None or not (
            self._is_built(canary) or await_reply(self._plan.folder, canary.key, self._stop) is not None
        ):
            return
        self._canary = None
        with contextlib.suppress(FarmError):
            self._canary_bundle = load_bundle(self._cache.folder(canary.key))
            self._canary_job = canary.job
            self._keep_loaded()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            # After what is being staged: that may use it.
            self._aside.submit(session.close).result()

    def _keep_loaded(self) -> None:
        bundle = self._canary_bundle
        if self._session is not None and bundle is not None and bundle.manifest.backend == ANCHORED:
            self._session.keep_loaded(bundle)

    def _try(self) -> str:
        """Return what is wrong with the device, empty when nothing is."""
        problem = self._ask_canary()
        if problem:
            self._end_session()
        return problem

    def _ask_canary(self) -> str:
        """Run the canary, or ask for a sign of life where there is none. Raises LocalError."""
        try:
            if self._runtime.needs_root:
                from farm.devices.root import ensure_root

                ensure_root(self.device)
            if self._canary_bundle is None:
                self.transport.run(["true"], timeout_s=_CANARY_SECONDS)
                return ""
            session, bundle = self.session, self._canary_bundle
            workspace = self.stage(lambda: session.stage(bundle)).result()
            options = RunnerOptions(
                iterations=_CANARY_INFERENCES,
                timeout_s=_CANARY_SECONDS,
                flags={**runtime_flags(self._canary_job.target), **self._plan.profile.flags(self.device.kind)},
            )
            folder = self._plan.folder / "raw" / f"canary-{self.device.serial}"
            attempt = judge(self._canary_job, bundle, session.execute(self._canary_job.id, workspace, folder, options))
        except OSError as error:
            raise local_error(error) from None
        except LocalError:
            raise
        except FarmError as error:
            return str(error)
        self._latency = next((m.samples for m in attempt.measurements if m.metric == "latency"), ())
        return "" if attempt.verdict is Verdict.PASSED else f"the canary did not pass: {attempt.reason}"

    def _mark(self, event: Event, reason: str = "", cause: str = "") -> None:
        mark = HealthMark(event, cause, reason)
        before = self._health
        self._health, why = next_health(before, self._marks, mark)
        self._reason = why or self._reason
        self._marks = [*self._marks, mark][-_MARKS:]
        self._doubt = self._doubt or is_doubtful(mark)
        # Whoever outvoted it has recorded that.
        if event not in (Event.JOB_DONE, Event.OUTVOTED) or self._health is not before:
            latency = self._latency if event is Event.CANARY_OK else ()
            self._record(self.device.id, str(event), self._health, why or reason, latency)

    def _log_step(self, step: StepResult) -> None:
        told = f"{step.step}: {step.problem or 'it answers again'}"
        self._record(self.device.id, "recovery", self._health, told)

    def _record(self, device: str, event: str, state: Health, reason: str, latency_ns: tuple[float, ...] = ()) -> None:
        """Let the store know, of a device that others meet as well."""
        if not self._plan.leased:
            return
        with contextlib.suppress(FarmError):
            self._store.devices.record_health(
                HealthEvent(device, event, str(state), reason, {"run": self._plan.run_id}, latency_ns)
            )

    def _prepare(self, session: DeviceSession) -> None:
        """Bring what is compiled already in one go. What goes wrong here will be told by a job."""
        bundles = []
        for planned in (*self._plan.canaries, *self._plan.jobs):
            if planned.cached and planned.job.target.soc == self.device.soc:
                with contextlib.suppress(FarmError):
                    bundles.append(load_bundle(self._cache.folder(planned.key)))
        with contextlib.suppress(FarmError, OSError):
            session.prepare(bundles)

    def _is_built(self, planned: PlannedJob) -> bool:
        return planned.cached or has_reply(self._plan.folder, planned.key)
