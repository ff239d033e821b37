"""One worker of the user's pytest: its device, whether that is fit, and what a test has to do with it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from farm.device_run.device_run import DeviceRun, HeatGate
from farm.devices.recovery import recover
from farm.errors import DeviceError, DeviceGoneError, InfraError, LeaseLostError, ProgramError
from farm.execution.content_store import SESSION_PREFIX
from farm.execution.liveness import Liveness, cause_of
from farm.pytest_plugin.device import LeasedDevice
from farm.pytest_plugin.grants import FileGrant, read_grant
from farm.pytest_plugin.record import DeviceFacts
from farm.pytest_plugin.upstream import RUNNER, Upstream, with_name
from farm.request.profiling import Profile
from farm.results.attempt import Cause, Stage
from farm.results.blame import is_open, unfit
from farm.system.processes import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from farm.bundles.bundle import Bundle
    from farm.pytest_plugin.plan import SuitePlan
    from farm.results.attempt import Attempt, Measurement, OperatorProfile
    from farm.suites.suite import Job

_SHELL_SECONDS = 30.0
# A lease that was lost, as after a long stop of the machine, is often given back at the next look.
_PERMIT_SECONDS = 20.0
_POLL_SECONDS = 0.1


class ExecutedProgram(msgspec.Struct, frozen=True):
    """One program that a test ran."""

    bundle_key: str
    measurements: tuple[Measurement, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()


class UnfitDeviceError(DeviceError):
    """A device, its session or its runtime that fails for a cause with a name."""

    def __init__(self, serial: str, problem: str, cause: Cause) -> None:
        self.cause = cause
        super().__init__(serial, problem)


class WrongNumbersError(AssertionError):
    """Outputs of a program that are beyond the limits of its case."""

    stage, cause = Stage.NUMERICS, Cause.NUMERICS


class SuiteWorker:
    """The device of a worker process. Belongs to the thread that runs the tests."""

    def __init__(self, plan: SuitePlan, number: int) -> None:
        self.plan, self._number = plan, number
        self.info = plan.devices[number]
        self.scratch = plan.folder / f"worker-{number}-{os.getpid()}"
        """A folder of this process alone on this machine."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        runtime = with_name(plan.runtimes[self.info.serial], RUNNER)
        # The device is taken over once for each lease: a session must not remove what tests have put there.
        self.run = DeviceRun(self.info, runtime, plan.token, takeover=False, gate=HeatGate(plan.health))
        transport = self.run.transport
        self.supervisor = Supervisor()
        folder = transport.storage / f"{SESSION_PREFIX}{plan.token}-{os.getpid()}-files"
        self.device = LeasedDevice(self.info, transport, folder, self._note)
        self.upstream = Upstream(plan, self.run, self.scratch)
        self.test_folder: Path = self.scratch
        """Where the file of the running test is."""
        self._liveness = Liveness(transport)
        self._grant: FileGrant | None = None
        self._takeover_due = False
        """A former owner's files and processes are still to be removed; later, they are those of tests."""
        self._doubt = ""
        """What went wrong with the device; it has to be brought back first."""
        self.given_up = ""
        """Why the device is of no use any more."""
        self._is_handed_over = False
        self._trouble: InfraError | None = None
        self._blamed: list[BaseException] = []
        self._failure: ProgramError | WrongNumbersError | None = None
        self._executed: list[ExecutedProgram] = []
        self._notes: list[str] = []

    def begin_test(self, folder: Path) -> None:
        """Forget what an earlier test had to do with the device."""
        self.test_folder = folder
        self._trouble = self._failure = None
        self._executed, self._notes = [], []

    def get_ready(self) -> None:
        """Make sure that the device may be used and answers. Raises LeaseLostError, also for one that was given up, and
        DeviceError.
        """
        try:
            if not self.given_up:
                self._renew()
            if self._doubt and not self.given_up:
                self._recover()
            if self.given_up:
                gone = DeviceGoneError(self.info.serial, f"it is not used any more: {self.given_up}")
                raise LeaseLostError(str(gone)) if self._is_handed_over else gone
        except InfraError as error:
            self._note(error)
            raise

    def checked(self, attempt: Attempt, canary: Callable[[], tuple[Job, Bundle] | None]) -> Attempt:
        """Return an attempt that failed; infra where the canary of the device fails as well."""
        if found := canary():
            self.run.set_canary(*found, Profile.OFF)
        self.run.end_session()
        problem = self._problem()
        return unfit(attempt, problem, self.run.canary_cause) if problem else attempt

    def executed(self, program: ExecutedProgram, notes: tuple[str, ...] = ()) -> None:
        """Note a program that the test ran."""
        self._executed.append(program)
        self._notes += notes

    def blame(self, error: BaseException) -> str:
        """Return what the farm or the device did wrong where a test failed with `error`; empty where it did nothing."""
        for one in _chain(error):
            if isinstance(one, (ProgramError, WrongNumbersError)) and self._failure is None:
                self._failure = one
            # A class that could not be set up fails all its tests with the same exception.
            if isinstance(one, InfraError) or any(one is other for other in self._blamed):
                return self._blame(error, one)
        if self._trouble is not None:
            return self._blame(error, self._trouble)
        try:
            self._liveness.demand()
        except DeviceError as problem:
            return self._blame(error, problem)
        return ""

    @property
    def open_cause(self) -> Cause:
        """Cause of the failure of the test where the device may be to blame; NONE of others."""
        cause = Cause(self._failure.cause) if self._failure is not None else Cause.NONE
        return cause if is_open(cause) else Cause.NONE

    def facts(self) -> DeviceFacts:
        """Return what is to be recorded of the test that ends."""
        only = self._executed[0] if len(self._executed) == 1 else ExecutedProgram("")
        trouble, failure = self._trouble, self._failure
        facts = DeviceFacts(
            self.info.serial,
            # What says only that the device was not used is true whoever has it now.
            self._grant.fence if self._grant is not None and not self.given_up else 0,
            bundle_key=only.bundle_key,
            measurements=only.measurements,
            operators=only.operators,
            notes=tuple(self._notes),
        )
        if len(self._executed) > 1:
            note = f"ran {len(self._executed)} programs: the numbers of none are kept"
            facts = msgspec.structs.replace(facts, notes=(*facts.notes, note))
        if failure is not None:
            facts = msgspec.structs.replace(facts, stage=Stage(failure.stage), cause=Cause(failure.cause))
        if trouble is not None:
            cause = Cause(cause_of(trouble)) if isinstance(trouble, DeviceError) else Cause.NONE
            cause = trouble.cause if isinstance(trouble, UnfitDeviceError) else cause
            cause = Cause.LEASE if isinstance(trouble, LeaseLostError) else cause
            facts = msgspec.structs.replace(facts, infra=str(trouble), cause=cause)
        return facts

    def close(self) -> None:
        """Leave the device as it was found."""
        if self._grant is not None and not self.given_up:
            self._leave()
        self.run.close()
        self.supervisor.close()

    def _leave(self) -> None:
        """Remove from the device what is ours, as far as it lets us."""
        self.upstream.clean()
        self.run.end_session()
        with contextlib.suppress(DeviceError):
            self._shell('rm -rf -- "$1"', self.device.folder)

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self.plan.leave_device(self._number, reason)

    def _renew(self) -> None:
        """Wait until the device may be used; under a new lease, begin anew on it."""
        deadline = time.monotonic() + _PERMIT_SECONDS
        while not (grant := read_grant(self.plan.folder, self._number)).go or grant.is_over:
            if self._grant is not None and grant.fence and grant.fence == self._grant.fence and not grant.is_over:
                self._leave()
                self._is_handed_over = True
                self._give_up("it is given to somebody who waits for it" if grant.wanted else "the session stops")
                return
            if time.monotonic() > deadline:
                raise LeaseLostError(f"{self.info.serial} may not be used any more: its lease was lost")
            time.sleep(_POLL_SECONDS)
        before, self._grant = self._grant, grant
        if before is not None and before.fence == grant.fence:
            return
        if before is not None:
            self.run.end_session()
        self._takeover_due = self.plan.leased
        self._begin()

    def _begin(self) -> None:
        """Make the device ours, as it is now."""
        self.run.begin(takeover=self._takeover_due)
        self._takeover_due = False
        self._liveness.demand()
        self._shell('mkdir -p -- "$1"', self.device.folder)

    def _recover(self) -> None:
        problem = recover(
            self.info,
            works=self._problem,
            hopeless=lambda: self.run.is_full or self.run.lacks_runtime,
        ).problem
        self.run.end_session()
        if problem:
            self._give_up(f"{self._doubt}; {problem}")
            return
        self._doubt = ""
        # It may have started anew: what it is now is what counts.
        self._liveness = Liveness(self.run.transport)
        self._begin()

    def _problem(self) -> str:
        """Return why the canary fails, or, without one, why the device does not answer; empty for a fit device."""
        problem = self.run.probe(self.scratch / "canary")
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

    def _blame(self, error: BaseException, why: BaseException) -> str:
        if not any(error is other for other in self._blamed):
            self._blamed.append(error)
        trouble = why if isinstance(why, InfraError) else DeviceGoneError(self.info.serial, "an earlier test lost it")
        self._note(trouble)
        if isinstance(trouble, DeviceError) and not self._doubt and not self.given_up:
            self._doubt = str(trouble)
        return str(trouble)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
