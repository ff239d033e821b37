"""Execution of a bundle on a device, from the lease to the recorded attempt: the one way for every command.

root, takeover   session, begin           access to the device: as root if the runtime needs it, and alone
health check     probe                    correct results of a known program
stage            stage, stage_ahead       bundle -> device, refused for a program that a virtual device cannot run
heat gate        execute, HeatGate.wait   wait for a hot or empty device before a measurement
execute          execute, run             RawResult
judge, damage    judge, excuse_damage     Attempt; results of damaged files do not count against the code
files to keep    keep, keep_crash_logs    ArtifactRecords
record           record                   in the store, under the fence of the lease
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec

from farm.base.backends.registry import find_backend
from farm.base.errors import (
    AdbServerError,
    DeviceError,
    DeviceGoneError,
    DeviceSpaceError,
    FarmError,
    InfraError,
    LocalError,
    MissingPackageError,
    NeedsDeviceError,
)
from farm.devices.connect import open_transport
from farm.devices.device import FULL, RUNTIME, Device
from farm.devices.execution.content_store import SESSION_PREFIX, Workspace
from farm.devices.execution.liveness import collect_crash_logs, take_over
from farm.devices.execution.raw import RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.facts import POLL_SECONDS, STATUS_SECONDS, check, read_status, wait_until_cool
from farm.devices.files import local_error
from farm.devices.transport import Transport
from farm.policy.retries import damaged
from farm.results.attempt import Attempt, Cause, Verdict
from farm.results.heap import no_heap
from farm.results.judge import judge
from farm.results.outcome import explain_by_logs
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.base.config.settings import HealthConfig
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.runtime.runtime import Runtime
    from farm.dispatch.device_run.artifacts import AttemptArtifacts
    from farm.dispatch.request.profiling import Execution, Profile
    from farm.store.records import ArtifactRecord
    from farm.store.store import Store
    from farm.suites.suite import Job, Target

logger = logging.getLogger(__name__)


class Thermometer:
    """Reads the temperature of a device as long as it is entered. A device that gives none has no readings."""

    def __init__(self, device: Device, transport: Transport, every_s: float = POLL_SECONDS) -> None:
        self._device, self._transport, self._every_s = device, transport, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="thermometer", daemon=True)
        self.readings: tuple[float, ...] = ()
        """Degrees Celsius, in the order of time: as `DeviceStatus.temperature_c`."""

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        # After an error the thread is not awaited, as the device may not answer.
        if error is None:
            self._thread.join(STATUS_SECONDS)
            if not self._thread.is_alive():
                self._read()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        try:
            celsius = read_status(self._transport, os=self._device.os).temperature_c
        except (InfraError, OSError):
            # The execution itself reports an absent device or a lost lease.
            return
        self.readings += () if celsius is None else (celsius,)


# Enough for a median and its spread; together they take less than one job.
_HEALTH_CHECK_INFERENCES = 20
_HEALTH_CHECK_SECONDS = 60.0
# A battery and a case change by less than a degree meanwhile.
_STATUS_SECONDS = 15.0

_MAY_BE_DAMAGE = (Cause.NUMERICS, Cause.REFUSED, Cause.UNSUPPORTED)
# The logs of the device have more about these than the runner could write.
_LOGGED = (Cause.CRASH, Cause.HANG, Cause.GONE, Cause.REFUSED, Cause.SESSION, Cause.DEVICE, Cause.RUNTIME)
# Causes of a health check that was refused: the logs of the device have the reason of the DSP.
_REFUSED = (Cause.REFUSED, Cause.DEVICE, Cause.RUNTIME)

_T = TypeVar("_T")


class HeatGate:
    """Wait of a device for a temperature and charge that suit measurements. Each device has its own."""

    def __init__(self, limits: HealthConfig, *, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop` returns True to end a wait."""
        self._limits, self._stop = limits, stop
        self._looked_at = float("-inf")
        self._too_hot = ""

    def wait(self, device: Device, transport: Transport) -> str:
        """Wait at most `gate_wait_s`, and return a remark for readers of the numbers; empty for none.

        An unanswering device is not waited for: the next execution reports its problem.
        """
        if time.monotonic() < self._looked_at + _STATUS_SECONDS:
            return self._too_hot
        limits = self._limits
        try:
            if not check(read_status(transport, os=device.os), limits):
                self._too_hot = ""
                return ""
            if self._too_hot:
                # Waiting has not helped: nor would it before every job.
                limits = msgspec.structs.replace(limits, gate_wait_s=0.0)
            note = wait_until_cool(transport, device.os, limits, sleep=time.sleep, stop=self._stop)
            self._too_hot = note if check(read_status(transport, os=device.os), limits) else ""
        except DeviceError:
            return ""
        finally:
            self._looked_at = time.monotonic()
        if note:
            logger.info("%s: %s", device.serial, note)
        return note


def require_device(bundle: Bundle, device: Device) -> None:
    """Raise NeedsDeviceError for a program that only a device runs, where `device` is virtual.

    Raises MissingPackageError for one whose op packages are not made for `device`.
    """
    if device.kind == "virtual" and (why := bundle.manifest.needs_device):
        raise NeedsDeviceError(why, device.soc)
    if problem := bundle.manifest.lacks_for("simulator" if device.kind == "virtual" else device.os):
        raise MissingPackageError(problem, device.serial)


class Staged(NamedTuple):
    """A bundle on a device, for one execution in the session that it was staged in."""

    session: DeviceSession
    workspace: Workspace


class DeviceRun:
    """A device that this process may use, and the programs that run on it. A context manager: leaves nothing there.

    Belongs to one thread; `execute` may be called in a second one.
    """

    def __init__(
        self,
        device: Device,
        runtime: Runtime,
        name: str,
        *,
        takeover: bool = False,
        fence: tuple[str, int] | None = None,
        gate: HeatGate | None = None,
        artifacts: AttemptArtifacts | None = None,
        pipelined: bool = False,
        opened: Callable[[DeviceSession], None] = lambda _: None,
    ) -> None:
        """`name` is in the names of this run's folders on the device.

        `takeover`: every session first ends and removes what others left there; for the holder of a lease. `fence` is
        the id of the device and the fence of its lease, where it has one; then `takeover` is True. Without a `gate`
        nothing is measured that heat could change. `artifacts` keeps files of attempts. `pipelined`: bundles are staged
        in a thread, so that one can be while another runs. `opened` is called with every session that begins.
        """
        self.device, self.runtime, self.fence = device, runtime, fence
        self._name, self._takeover, self._gate = name, takeover or fence is not None, gate
        self._artifacts, self._opened = artifacts, opened
        self.transport: Transport = open_transport(device)
        self._session: DeviceSession | None = None
        self._sessions = 0
        self._health_check: tuple[Job, Bundle, RunnerOptions] | None = None
        self.health_check_latency_ns: tuple[float, ...] = ()
        """Latency of each inference in the last health check."""
        self.health_check_cause = Cause.NONE
        """Cause of its failure when it ran last."""
        self.lacks_heap = ""
        """Reason in one line why ExecuTorch measured no heap around the health check; empty for a measured heap."""
        self._executing = threading.Lock()
        # A single thread stages bundles: a device has one cable, and bundles are needed in the order of staging.
        self._stager = ThreadPoolExecutor(1, "stage") if pipelined else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """True if files of this run may be on the device."""
        return self._session is not None

    @property
    def session(self) -> DeviceSession:
        """Session of the programs, begun on first use. Raises DeviceError if root is required and unavailable.

        Files of a former owner are removed with the first staged bundle.
        """
        if self._session is None:
            self._get_root()
            self._sessions += 1
            # With a number, as a session must not meet what one before it left.
            name = f"{self._name}.{self._sessions}"
            self._session = DeviceSession(
                self.transport, self.runtime, name, self.device.serial, takeover=self._takeover
            )
            self._keep_health_check_loaded()
            self._opened(self._session)
        return self._session

    @property
    def is_full(self) -> bool:
        """True for a device without room for the last health check."""
        return self.health_check_cause is Cause.SPACE

    @property
    def lacks_runtime(self) -> bool:
        """True for a device whose libraries did not fit the last health check."""
        return self.health_check_cause is Cause.RUNTIME

    def begin(self, *, takeover: bool) -> None:
        """Get root and take the device over at once, for who uses it without a session. Raises DeviceError."""
        self._get_root()
        if takeover:
            take_over(self.transport, f"{SESSION_PREFIX}{self._name}")

    def set_health_check(self, job: Job, bundle: Bundle, profile: Profile, *, heap: bool = False) -> None:
        """Let `probe` run this program, and sessions of a backend that has to be kept up keep it loaded.

        `heap`: measure the DSP's heap around it, in a process of its own; no session keeps it loaded.
        """
        flags = self.flags(job.target, None if heap else profile)
        inferences, warm_up = (1, 0) if heap else (_HEALTH_CHECK_INFERENCES, 1)
        options = RunnerOptions(inferences, warm_up, _HEALTH_CHECK_SECONDS, flags, heap=heap)
        self._health_check = job, bundle, options
        self._keep_health_check_loaded()

    def probe(self, folder: Path) -> str:
        """Run the health check, or ask for a sign of life without one; return the problem, empty for none.

        Files of the health check lie in the local `folder`. Raises LocalError.
        """
        self.health_check_cause = Cause.NONE
        try:
            self._get_root()
            if self._health_check is None:
                self.transport.run(["true"], timeout_s=_HEALTH_CHECK_SECONDS)
                return ""
            job, bundle, options = self._health_check
            raw = self._execute(job.id, self.stage(bundle), folder, options, alone=options.heap)
            self.lacks_heap = no_heap(judge(job, bundle, raw)) if options.heap else ""
            # The heap of the DSP is no part of a device's health.
            attempt = self._explained(judge(job, bundle, msgspec.structs.replace(raw, heap=False)), folder / "logs")
        except OSError as error:
            raise local_error(error) from None
        except LocalError:
            raise
        except FarmError as error:
            self.health_check_cause = Cause.SPACE if isinstance(error, DeviceSpaceError) else Cause.NONE
            return str(error)
        self.health_check_cause = attempt.cause
        timed = () if options.heap else attempt.measurements
        self.health_check_latency_ns = next((m.samples for m in timed if m.metric == "latency"), ())
        passed = attempt.verdict is Verdict.PASSED or bool(self.lacks_heap)
        return "" if passed else f"the health check did not pass: {attempt.reason}"

    @property
    def session_ended(self) -> bool:
        """True for a rented device after its session: its time is over, or its server has lost it."""
        if not self.device.until_s or self.device.is_over:
            return self.device.is_over
        try:
            self.transport.run(["true"], timeout_s=_HEALTH_CHECK_SECONDS)
        except (DeviceGoneError, AdbServerError):
            return True
        except DeviceError:
            return False
        return False

    def silence_cause(self) -> str:
        """Return the cause of a failing health check outside the device: adb server, runtime, or files of others."""
        if self.is_full:
            return FULL
        if self.lacks_runtime:
            return RUNTIME
        if self.session_ended:
            return str(Cause.LEASE)
        return "" if self.transport.server_answers() else str(Cause.ADB_SERVER)

    def flags(self, target: Target, profile: Profile | None) -> dict[str, str]:
        """Return the flags of the runner for jobs of `target`: run-time options and profiling.

        Direct mode's runner has no flags.
        """
        profiled = profile is not None and not target.direct
        return {**runtime_flags(target), **(profile.flags(self.device.kind) if profile and profiled else {})}

    def options(self, job: Job, execution: Execution) -> RunnerOptions:
        """Return the options of the runner for an execution of `job`."""
        if execution.heap:
            processes = 1 if execution.reducible else execution.iterations
            return RunnerOptions(processes, 0, execution.timeout_s, self.flags(job.target, None), heap=True)
        repeats = job.case.deterministic is True
        # Times of a simulator are no measurements: see docs/reference/virtual_devices.md.
        few = execution.reducible and self.device.kind == "virtual" and not repeats
        return RunnerOptions(
            iterations=1 if few else execution.iterations,
            warm_up=execution.warm_up,
            timeout_s=execution.timeout_s,
            flags=self.flags(job.target, execution.profile),
            etdump=execution.profile.kept,
            reducible=execution.reducible,
            repeats=repeats,
            # A health check generates nothing.
            seconds=execution.seconds if job.case.generate is not None else None,
        )

    def stage(self, bundle: Bundle) -> Staged:
        """Bring a bundle to the device. Device failures become part of the result, except a refused root.

        Raises NeedsDeviceError, as each function that runs a program.
        """
        require_device(bundle, self.device)
        if self._stager is not None:
            return self.stage_ahead(lambda: bundle).result()
        return Staged(self.session, self.session.stage(bundle))

    def stage_ahead(self, find: Callable[[], Bundle]) -> Future[Staged]:
        """Stage the bundle that `find` returns, in the thread of a pipelined run. Raises DeviceError for root."""
        session = self.session

        def stage() -> Staged:
            bundle = find()
            require_device(bundle, self.device)
            return Staged(session, session.stage(bundle))

        return self._in_stager(stage)

    def prepare(self, session: DeviceSession, find: Callable[[], tuple[list[Bundle], int]]) -> None:
        """Look for many bundles, and push the first ones in one batch; the first job reports a failure.

        `find` returns the bundles, and how many to push. It is called in the staging thread.
        """

        def prepare() -> None:
            try:
                bundles, share = find()
                session.prepare(bundles, share=share)
            except (FarmError, OSError):
                return

        self._in_stager(prepare)

    def run(
        self, job_id: str, bundle: Bundle, folder: Path, options: RunnerOptions, *, alone: bool = False
    ) -> RawResult:
        """Stage a bundle and execute it, as `stage` and `execute`."""
        return self.execute(job_id, self.stage(bundle), folder, options, alone=alone)

    def execute(
        self, job_id: str, staged: Staged, folder: Path, options: RunnerOptions, *, alone: bool = False
    ) -> RawResult:
        """Wait for the heat gate, run the staged bundle, and pull its files into the new local `folder`.

        `alone` uses a runner process for this job only. Device failures become part of the result.
        """
        note = self._gate.wait(self.device, self.transport) if self._gate is not None else ""
        if options.seconds is None:
            raw = self._execute(job_id, staged, folder, options, alone=alone)
        else:
            with Thermometer(self.device, self.transport) as thermometer:
                raw = self._execute(job_id, staged, folder, options, alone=alone)
            raw = msgspec.structs.replace(raw, temperatures_c=thermometer.readings)
        return msgspec.structs.replace(raw, notes=(*raw.notes, note)) if note else raw

    def judge(
        self, job: Job, bundle: Bundle, raw: RawResult, *, operators: bool = False, any_runner: bool = False
    ) -> Attempt:
        """Return the attempt of an execution, as `farm.results.judge.judge`; infra if files were damaged."""
        return self.excuse_damage(judge(job, bundle, raw, operators=operators, any_runner=any_runner), bundle, raw)

    def excuse_damage(self, attempt: Attempt, bundle: Bundle, raw: RawResult) -> Attempt:
        """Return an attempt of a recent execution; infra if its files on the device or its outputs were damaged."""
        if attempt.verdict is not Verdict.FAILED or attempt.cause not in _MAY_BE_DAMAGE:
            return attempt
        with self._executing:
            damage = self.session.find_damage(bundle, raw)
        return damaged(attempt, damage) if damage else attempt

    def keep(self, attempt: Attempt, bundle: Bundle, folder: Path) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep the files in `folder` that are wanted; return the attempt with notes on what could not be kept."""
        if self._artifacts is None:
            return attempt, ()
        return self._artifacts.keep(attempt, bundle, folder, lambda: self.session)

    def keep_crash_logs(self, attempt: Attempt, folder: Path) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep the device's logs of an attempt that was refused, ended the runner or lost the device, in `folder`.

        The attempt is returned with the known trouble in the logs.
        """
        if self._artifacts is None or attempt.cause not in _LOGGED:
            return attempt, ()
        try:
            return self._artifacts.keep_crash_logs(
                attempt, self.transport, self.device, folder, since_s=attempt.started_ms / 1000
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def record(self, store: Store, run_id: str, attempt: Attempt, artifacts: tuple[ArtifactRecord, ...] = ()) -> None:
        """Record an attempt under the fence. Raises LeaseLostError if another user has the device, StoreError."""
        store.record_attempt(run_id, attempt, artifacts=artifacts, fence=self.fence)

    def abort(self) -> None:
        """End what runs with an error."""
        if self._session is not None:
            self._session.abort()

    def end_process(self) -> None:
        """Let the next execution begin a new process of the runner."""
        if self._session is not None:
            with self._executing:
                self._session.end_process()

    def end_session(self, *, free: bool = False) -> None:
        """Remove the session's files, with `free` also kept objects, from the device; the next use begins another."""
        session, self._session = self._session, None
        if session is not None:
            # Closed in the staging thread, after a bundle in progress that may use it.
            self._in_stager(partial(session.close, free=free)).result()

    def close(self) -> None:
        """Leave the device for good."""
        if self._stager is not None:
            self._stager.shutdown(cancel_futures=True)
            self._stager = None
        self.end_session()
        self.transport.close()

    def _execute(
        self, job_id: str, staged: Staged, folder: Path, options: RunnerOptions, *, alone: bool = False
    ) -> RawResult:
        execute = staged.session.execute_alone if alone else staged.session.execute
        with self._executing:
            return execute(job_id, staged.workspace, folder, options)

    def _explained(self, health_check: Attempt, folder: Path) -> Attempt:
        """Return the attempt of the health check; a refused one with the known trouble in the device's logs."""
        if health_check.cause not in _REFUSED:
            return health_check
        logs = collect_crash_logs(self.transport, self.device.os, folder, since=health_check.started_ms / 1000)
        return explain_by_logs(health_check, [path.read_text(encoding="utf-8") for path in logs.values()])

    def _in_stager(self, action: Callable[[], _T]) -> Future[_T]:
        if self._stager is not None:
            return self._stager.submit(action)
        done: Future[_T] = Future()
        done.set_result(action())
        return done

    def _get_root(self) -> None:
        if self.runtime.needs_root:
            self.transport.ensure_root()

    def _keep_health_check_loaded(self) -> None:
        if (
            self._session is not None
            and self._health_check is not None
            # A program that stays loaded would be in every number of the heap.
            and not self._health_check[2].heap
            and find_backend(self._health_check[1].manifest.backend).keeps_health_check
        ):
            self._session.keep_loaded(self._health_check[1])
