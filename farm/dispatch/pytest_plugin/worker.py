"""Device of a process that runs the user's tests: lease, health, and the attempts of the running test.

The fixture `device` is the small part of a leased device that tests need.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import (
    DeviceError,
    DeviceGoneError,
    DeviceTimeoutError,
    FarmError,
    InfraError,
    LeaseLostError,
    NoDeviceError,
    ProgramError,
)
from farm.base.processes import Supervisor
from farm.base.text import count_of
from farm.builds.compile.torch_graphs import TorchGraphs
from farm.devices.adb.protocol import choose_server
from farm.devices.execution.content_store import SESSION_PREFIX
from farm.devices.execution.liveness import Liveness, cause_of
from farm.devices.recovery import recover
from farm.dispatch.device_run.device_run import DeviceRun, HeatGate
from farm.dispatch.pytest_plugin.record import DeviceFacts, UpstreamResult
from farm.dispatch.pytest_plugin.upstream import RUNNER, Upstream, with_name
from farm.dispatch.request.profiling import Profile
from farm.policy.retries import Tried, classify, is_open, unfit
from farm.results.attempt import Attempt, Cause, Measurement, OperatorProfile, Stage, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pytest

    from farm.builds.bundles.bundle import Bundle
    from farm.devices.device import Device
    from farm.devices.transport import Completed, Transport
    from farm.dispatch.pytest_plugin.lease import DeviceLease
    from farm.dispatch.pytest_plugin.plan import SuitePlan
    from farm.suites.suite import Job

_PULL_BYTES = 1 << 30
_ASK_SECONDS = 15.0


class LeasedDevice:
    """Leased device of this worker; after a loss, the next device.

    Every method raises DeviceError for faults of the device or its cable, which make a test `infra` and not `failed`.
    Mistakes of the test itself raise Python's own errors: TimeoutError, FileNotFoundError, ValueError.
    """

    info: Device
    """Facts about the device."""
    folder: PurePosixPath
    """Folder of this worker alone on the device, removed at the end; relative paths start there."""
    _transport: Transport

    def __init__(self, note: Callable[[DeviceError], None]) -> None:
        """Pass every DeviceError to `note`, even if the test catches it."""
        self._note = note

    def use(self, info: Device, transport: Transport, folder: PurePosixPath) -> None:
        """Stand for another device from now on."""
        self.info, self._transport, self.folder = info, transport, folder

    def __repr__(self) -> str:
        return f"<{self.info.soc} {self.info.serial}>"

    @property
    def serial(self) -> str:
        """Serial of the device in farm."""
        return self.info.serial

    @property
    def soc(self) -> str:
        """SoC as in device profiles: `SM8650`."""
        return self.info.soc

    @property
    def is_virtual(self) -> bool:
        """True for a simulator, whose times are times of this machine."""
        return self.info.kind == "virtual"

    @property
    def adb_name(self) -> str:
        """Serial for `adb -s` at the server of ANDROID_ADB_SERVER_PORT; empty for a device without adb."""
        return self._transport.tool_environment().get("ANDROID_SERIAL", "")

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        cwd: str | PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run the program `argv[0]` and return `code`, `stdout`, `stderr` (bytes) and `seconds`; no shell reads `argv`.

        Raises TimeoutError for a program that does not end in time, DeviceError.
        """
        try:
            return self._transport.run(argv, stdin=stdin, timeout_s=timeout_s, cwd=self._path(cwd or "."), env=env)
        except DeviceTimeoutError as error:
            self._ask(error)
            raise TimeoutError(f"{self.serial}: {argv[0]} did not end within {timeout_s:g} s") from None
        except DeviceError as error:
            self._note(error)
            raise

    def push(self, files: Mapping[str | PurePosixPath, str | Path | bytes]) -> None:
        """Write local files, or bytes, to paths on the device, and create their folders. Raises DeviceError."""
        absolute = {
            self._path(to): content if isinstance(content, bytes) else Path(content) for to, content in files.items()
        }
        for content in absolute.values():
            if isinstance(content, Path) and not content.is_file():
                raise FileNotFoundError(f"{content} is not a file")
        try:
            self._transport.push(dict(absolute))
        except DeviceError as error:
            self._note(error)
            raise

    def pull(self, path: str | PurePosixPath, to: str | Path, *, max_bytes: int = _PULL_BYTES) -> Path:
        """Copy a file of the device to the local file `to`, whose folder must exist, and return the local path.

        Raises FileNotFoundError for a missing file, ValueError for a file of more than `max_bytes`, DeviceError.
        """
        remote, local = self._path(path), Path(to)
        try:
            self._transport.pull({remote: local}, max_bytes=max_bytes)
        except DeviceError as error:
            self._explain(remote, max_bytes, error)
            self._note(error)
            raise
        return local

    def _path(self, path: str | PurePosixPath) -> PurePosixPath:
        return self.folder / path

    def _ask(self, error: DeviceError) -> None:
        """Raise `error` unless the device answers: an answering device did not cause the timeout."""
        try:
            self._transport.run(["true"], timeout_s=_ASK_SECONDS)
        except DeviceError:
            self._note(error)
            raise error from None

    def _explain(self, remote: PurePosixPath, max_bytes: int, error: DeviceError) -> None:
        """Raise FileNotFoundError or ValueError for a missing or too large file, the test's own mistakes."""
        script = 'if [ -f "$1" ]; then wc -c <"$1"; else echo none; fi'
        try:
            answer = self._transport.run(["sh", "-c", script, "sh", str(remote)], timeout_s=_ASK_SECONDS).stdout.strip()
        except DeviceError:
            return
        if answer == b"none":
            raise FileNotFoundError(f"{self.serial} has no file {remote}") from None
        size = count_of(answer.decode(errors="replace"))
        if size is not None and size > max_bytes:
            raise ValueError(f"{self.serial}: {remote} has {size} bytes, more than {max_bytes}") from error


_SHELL_SECONDS = 30.0
# Another worker exchanges its device after its running test, which may compile for minutes.
_OTHER_SECONDS = 600.0


class ExecutedProgram(msgspec.Struct, frozen=True):
    """Program that a test executed."""

    bundle_key: str
    measurements: tuple[Measurement, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()


class UnfitDeviceError(DeviceError):
    """Failure of a device, its session or its runtime, with a cause."""

    def __init__(self, serial: str, problem: str, cause: Cause) -> None:
        self.cause = cause
        super().__init__(serial, problem)


class WrongNumbersError(AssertionError):
    """Outputs of a program outside of its case's limits."""

    stage, cause = Stage.NUMERICS, Cause.NUMERICS


class SuiteWorker:
    """Device of a process that runs tests, and the attempts of the running test. Belongs to one thread."""

    run: DeviceRun
    info: Device

    def __init__(self, plan: SuitePlan, lease: DeviceLease, config: pytest.Config | None = None) -> None:
        """`config` receives the options of upstream's newer tests."""
        self.plan, self._lease, self._config = plan, lease, config
        self.scratch = plan.folder / f"worker-{os.getpid()}"
        """Local folder of this process alone."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.supervisor = Supervisor()
        self.device = LeasedDevice(self._note)
        self.upstream = Upstream(plan, self.scratch)
        self.upstream.set_options(config)
        self.test_folder: Path = self.scratch
        """Folder of the running test's file."""
        self._liveness: Liveness
        self.serial = ""
        self._doubt = ""
        """Problem of the device, which has to be recovered before its next use; empty for none."""
        self._takeover_due = False
        """True until files and processes of a former owner are removed."""
        self.given_up = ""
        """Reason for the lack of any device; empty with one."""
        self._classified: list[BaseException] = []
        self._graphs = TorchGraphs()
        self._history: tuple[Tried, ...] = ()
        """Attempts of the running test on other devices."""
        self._is_alone = False
        """True if no other device could be leased for the running test."""
        self._begin_attempt()

    def begin_test(self, folder: Path) -> None:
        """Reset the state of the earlier test; a repeated test keeps its attempts."""
        self.test_folder = folder
        self._graphs.release()
        self._history = (*self._history, self._tried_now()) if self.repeats else ()
        self._is_alone = self._is_alone and self.repeats
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._trouble: InfraError | None = None
        self._failure: ProgramError | WrongNumbersError | None = None
        self._executed: list[ExecutedProgram] = []
        self._notes: list[str] = []
        self.upstream_result: UpstreamResult | None = None
        """Upstream's own record of the running test."""
        self._fence = 0
        self._others: int | None = None
        """Number of devices that may try the test again; None before a failure."""
        self.repeats = False
        """True if the test runs again on another device."""

    def get_ready(self) -> None:
        """Ensure a leased device that answers and has not tried the test. Raises InfraError."""
        try:
            self._hold()
            self._fence = self._lease.fence
        except InfraError as error:
            self._note(error)
            raise

    def use(self, device: Device) -> None:
        """Run tests on a device from now on."""
        plan, self.info, self.serial = self.plan, device, device.serial
        runtime = with_name(plan.runtimes[device.serial], RUNNER)
        # The device is taken over once for each lease: a session must not remove what tests have put there.
        self.run = DeviceRun(device, runtime, plan.token, gate=HeatGate(plan.health))
        transport = self.run.transport
        folder = transport.storage / f"{SESSION_PREFIX}{plan.token}-{os.getpid()}-files"
        self.device.use(device, transport, folder)
        self._liveness = Liveness(transport)
        if variables := transport.tool_environment():
            choose_server(os.environ, variables)
        self.upstream.use(self.run)
        self.upstream.set_options(self._config)

    def checked(self, attempt: Attempt, health_check: Callable[[], tuple[Job, Bundle] | None]) -> Attempt:
        """Return a failed attempt; infra if the device's health check fails as well."""
        if found := health_check():
            self.run.set_health_check(*found, Profile.OFF)
        self.run.end_session()
        problem = self._problem()
        return unfit(attempt, problem, self.run.health_check_cause) if problem else attempt

    def executed(self, program: ExecutedProgram, notes: tuple[str, ...] = ()) -> None:
        """Note a program that the test executed."""
        self._executed.append(program)
        self._notes += notes

    def classify(self, error: BaseException) -> str:
        """Return the fault of the farm or the device behind a test's `error`; empty for none."""
        for one in _chain(error):
            if isinstance(one, (ProgramError, WrongNumbersError)) and self._failure is None:
                self._failure = one
            # A failed set-up of a class fails all of its tests with the same exception.
            if isinstance(one, InfraError) or any(one is other for other in self._classified):
                return self._classify(error, one)
        if self._trouble is not None:
            return self._classify(error, self._trouble)
        try:
            self._lease.require()
            if self._lease.device is not None:
                self._liveness.demand()
        except InfraError as problem:
            return self._classify(error, problem)
        return ""

    @property
    def open_cause(self) -> Cause:
        """Cause of a failure that may be the device's fault; NONE for other failures."""
        cause = Cause(self._failure.cause) if self._failure is not None else Cause.NONE
        return cause if is_open(cause) else Cause.NONE

    def decide_repeat(self) -> bool:
        """Return whether another device runs the test again, after a failure that may be the device's fault."""
        if self._others is None:
            history = (*self._history, self._tried_now())
            try:
                self._others = 0 if self._is_alone else len(self._lease.others({one.device for one in history}))
            except FarmError:
                self._others = 0
            self.repeats = classify(history, others=self._others).repeat
        return self.repeats

    def facts(self) -> DeviceFacts:
        """Return the facts of the ending test for its record."""
        only = self._executed[0] if len(self._executed) == 1 else ExecutedProgram("")
        several = f"ran {len(self._executed)} programs: the numbers of none are kept" if self._executed[1:] else ""
        result, trouble = self.upstream_result or UpstreamResult(), self._trouble
        stage, cause = result.stage, result.cause
        if self._failure is not None:
            stage, cause = Stage(self._failure.stage), Cause(self._failure.cause)
        if trouble is not None:
            cause = _cause_of(trouble)
        return DeviceFacts(
            self.serial,
            # Without the fence the store accepts the attempt, although another user has the device.
            0 if isinstance(trouble, LeaseLostError) else self._fence,
            infra=str(trouble or ""),
            stage=stage,
            cause=cause,
            reason=result.reason,
            unexecuted=result.unexecuted,
            bundle_key=only.bundle_key,
            measurements=only.measurements,
            operators=only.operators,
            notes=(*self._notes, *filter(None, [several]), *result.notes),
            earlier=self._history,
            others=self._others or 0,
        )

    def close(self) -> None:
        """Clean and release the device."""
        self._leave()
        self._lease.close()
        self.supervisor.close()

    def _tried_now(self) -> Tried:
        facts = self.facts()
        return Tried(facts.device, Verdict.INFRA if facts.infra else Verdict.FAILED, facts.cause, facts.stage, "")

    def _hold(self) -> None:
        """Ensure a leased device that may run the test."""
        tried = {one.device for one in self._history}
        if self.given_up:
            raise NoDeviceError(self.given_up)
        if self._doubt and self._lease.is_ours:
            self._recover()
        self._doubt = ""
        if not self._lease.is_ours or self.serial in tried:
            self._take(tried)
        elif instead := self._lease.wanted_elsewhere():
            self._take(tried, [*instead, self.info])

    def _take(self, tried: set[str], devices: Sequence[Device] = ()) -> None:
        """Lease a device without an attempt of the test, else any of `devices`, and begin to run tests there."""
        self._leave()
        device = None
        if tried:
            with contextlib.suppress(NoDeviceError):
                device = self._lease.acquire(self._lease.others(tried), _OTHER_SECONDS)
            self._is_alone = device is None
        while device is None:
            device = self._lease.acquire(devices or self._usable())
        self.use(device)
        self._takeover_due = self.plan.leased
        self._begin()

    def _usable(self) -> list[Device]:
        """Return the devices that are not given up. Raises NoDeviceError without any."""
        if devices := self._lease.usable():
            return devices
        left = self.plan.devices_left()
        why = [f"{device.serial}: {left[device.id]}" for device in self.plan.devices if device.id in left]
        self.given_up = f"no {self.plan.soc} is left to run tests: {'; '.join(why)}"
        raise NoDeviceError(self.given_up)

    def _leave(self) -> None:
        """Remove our files and processes from the device, if it answers, and release it."""
        if self._lease.device is not None:
            if not self._lease.is_lost and not self._doubt:
                self.upstream.clean()
                self.run.end_session()
                with contextlib.suppress(DeviceError):
                    self._shell('rm -rf -- "$1"', self.device.folder)
            self.run.close()
            self._lease.release()

    def _begin(self) -> None:
        """Begin on the device in its present state."""
        self.run.begin(takeover=self._takeover_due)
        self._takeover_due = False
        self._liveness.demand()
        self._shell('mkdir -p -- "$1"', self.device.folder)

    def _recover(self) -> None:
        """Recover the device, or give it up for good."""
        problem = recover(
            self.info,
            find_problem=self._problem,
            is_unrecoverable=lambda: self.run.is_full or self.run.lacks_runtime,
        ).problem
        self.run.end_session()
        if problem:
            self.plan.leave_device(self.info, f"{self._doubt}; {problem}")
            self._leave()
            return
        # The device may have rebooted: begin with its present state.
        self._liveness = Liveness(self.run.transport)
        self._begin()

    def _problem(self) -> str:
        """Return why the health check fails, or without one, why the device does not answer; empty for a fit device."""
        problem = self.run.probe(self.scratch / "health_check")
        if problem:
            self.run.end_session()
        return problem

    def _shell(self, script: str, *words: PurePosixPath) -> None:
        argv = ["sh", "-c", script, "sh", *map(str, words)]
        done = self.run.transport.run(argv, timeout_s=_SHELL_SECONDS)
        if done.code != 0:
            stderr = done.stderr.decode(errors="replace")
            raise DeviceError(self.info.serial, "its storage cannot be used", argv=argv, code=done.code, stderr=stderr)

    def _note(self, error: InfraError) -> None:
        self._trouble = self._trouble or error

    def _classify(self, error: BaseException, why: BaseException) -> str:
        if not any(error is other for other in self._classified):
            self._classified.append(error)
        trouble = why if isinstance(why, InfraError) else DeviceGoneError(self.serial, "an earlier test lost it")
        self._note(trouble)
        if isinstance(trouble, DeviceError) and not self._doubt and not self.given_up:
            self._doubt = str(trouble)
        return str(trouble)


def _cause_of(trouble: InfraError) -> Cause:
    """Return the cause of a failure of the farm or the device; NONE for an unknown one."""
    if isinstance(trouble, LeaseLostError):
        return Cause.LEASE
    if isinstance(trouble, UnfitDeviceError):
        return trouble.cause
    return Cause(cause_of(trouble)) if isinstance(trouble, DeviceError) else Cause.NONE


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the chain of its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
