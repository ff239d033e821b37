"""What one worker process does with a job: ask whether it may, wait for the bundle, execute, blame, record."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import tempfile
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from farm.device_run.builds import await_reply
from farm.device_run.device_worker import DeviceWorker, HealthStore
from farm.device_run.executor import Executor
from farm.devices.local.files import local_errors
from farm.errors import FarmError, LeaseLostError, LocalError, RowRefusedError, StoreError, StoreLostError
from farm.pool.worker_grant import WorkerGrant, read_grant
from farm.request.pytest_session import STORE_VARIABLE
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.blame import Tried, classify, is_open, needs_health_check, settle, tried, unfit
from farm.store.store import open_store
from farm.system.atomic import write_atomically
from farm.system.structs import prepare_decoders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farm.request.plan import PlannedJob, RunPlan
    from farm.store.records import ArtifactRecord

_POLL_SECONDS = 1.0
# What an attempt leaves, with some to spare: with less the next one fails as well.
_ROOM_BYTES = 1 << 20
# A job whose adb server ended so often on one device may be what ends it.
_MOST_SERVER_LOSSES = 2

_Answer = TypeVar("_Answer")


class Done(NamedTuple):
    """A job that was tried here."""

    attempt: Attempt
    avoid: tuple[str, ...] = ()
    """Serials of the devices that have tried it, when another one should."""
    outvoted: tuple[str, ...] = ()
    """Serials of the devices on which it had failed, when it passed here."""


class Returned(NamedTuple):
    """A job that was not begun, as the device may not be used."""

    device: str
    fence: int = 0
    """Of the lease that it is about."""
    off: bool = False
    """Nothing of ours is on the device any more."""
    unfit: str = ""
    """What is wrong with the device: it has to be recovered first."""
    recovered: bool = False
    given_up: str = ""
    """Why the device is of no use to this run."""
    halt: str = ""
    """Why no device of this run is of use now: this machine, or the store, has failed for too long."""

    def shown(self) -> dict[str, str | int | bool]:
        """Return it for a report."""
        return self._asdict()


class ResultStore(HealthStore, Protocol):
    """Where a worker leaves its results: a store, or what is in its place."""

    def record_attempt(
        self,
        run_id: str,
        attempt: Attempt,
        *,
        artifacts: Sequence[ArtifactRecord] = (),
        fence: tuple[str, int] | None = None,
    ) -> None:
        """Record an attempt. Raises LeaseLostError, StoreError."""

    def close(self) -> None:
        """Let go of it."""


class Outfit(NamedTuple):
    """What a worker works with."""

    store: ResultStore
    device_worker: DeviceWorker
    executor: Executor


def outfit_of(plan: RunPlan, number: int, unwanted: Callable[[], bool]) -> Outfit:
    """Return the real parts for a device of `plan`; `unwanted` tells that nobody waits for it any more.

    Raises StoreError.
    """
    # The run is in it: a new one would be of no use.
    store = open_store(os.environ[STORE_VARIABLE], existing=True)
    device_worker = DeviceWorker(plan, number, store, unwanted)
    return Outfit(store, device_worker, Executor(plan, device_worker))


class Worker:
    """One device, one store connection."""

    def __init__(
        self,
        plan: RunPlan,
        number: int,
        controller: int,
        outfit: Callable[[RunPlan, int, Callable[[], bool]], Outfit] = outfit_of,
    ) -> None:
        """`controller` is the id of the process that gives grants: none of them holds when it is gone.

        Raises StoreError for a store that stays away.
        """
        prepare_decoders()
        self._plan, self._number, self._controller = plan, number, controller
        self._device = plan.devices[number]
        self._local_trouble_s: float | None = None
        """When this machine began to fail, on the monotonic clock; None while it works."""
        self._server_losses: Counter[str] = Counter()
        """How often the adb server ended under a job."""
        self._store, self._device_worker, self._executor = self._once_store_answers(
            lambda: outfit(plan, number, self._unwanted)
        )
        self._grant = WorkerGrant(go=False)
        if self._may_go():
            # While the first job is on its way.
            self._device_worker.begin()

    def _once_store_answers(self, action: Callable[[], _Answer]) -> _Answer:
        """Return what `action` does, once the store is there. Raises StoreError when it stays away or is lost."""
        deadline = time.monotonic() + self._plan.health.store_wait_s
        while True:
            try:
                return action()
            except (StoreLostError, RowRefusedError):
                raise
            except StoreError:
                if time.monotonic() > deadline or self._is_orphan:
                    raise
                # So that the controller sees this process go on.
                self._read_grant()
                time.sleep(_POLL_SECONDS)

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> Done | Returned:
        """Run one job, record its attempts, and return the last. `following` is staged while this one runs.

        A job under which the adb server ends is neither tried nor lost: it runs again, here once the canary passes.
        """
        while True:
            may_go = self._may_go()
            try:
                # What has begun is finished, whatever the newest grant is.
                returned = None if self._executor.has_begun(planned) else self._get_ready(planned, may_go=may_go)
                done = returned or self._run(planned, following if may_go else None)
                if done is not None:
                    return done
            except LeaseLostError:
                return self._off()
            except RowRefusedError:
                # This job has no result; others may have one.
                raise
            except StoreError as error:
                return self._returned(halt=f"the store: {error}")
            except LocalError as error:
                attempt = Attempt(planned.job.id, Verdict.INFRA, Stage.EXECUTE, str(error), cause=Cause(error.cause))
                if not error.is_general:
                    return self._finish(attempt)
                if not self._has_recovered():
                    # Where the store is on the same disk the run alone says why.
                    with contextlib.suppress(FarmError):
                        self._store.record_attempt(self._plan.run_id, attempt)
                    return self._returned(halt=str(error))

    def _get_ready(self, planned: PlannedJob, *, may_go: bool) -> Returned | None:
        """Wait until a job can begin; or return why it cannot, here and now."""
        if not may_go:
            # What is to be recovered is recovered when no job is kept waiting by it.
            return self._returned() if self._grant.recover and not self._is_orphan else self._not_begun()
        self._device_worker.await_canary()
        built = self._executor.is_built(planned)
        if not built and await_reply(self._plan.folder, planned.key, self._unwanted) is None:
            return self._not_begun()
        problem = self._device_worker.check()
        if self._unwanted():
            return self._not_begun()
        if not problem:
            return None
        self._executor.forget()
        return self._given_up(problem) if self._device_worker.given_up else self._returned(unfit=problem)

    def look(self) -> Returned | None:
        """Bring the device back, or let go of it, where the controller says so, and return what came of it."""
        if self._may_go():
            return None
        if not self._grant.recover or self._is_orphan:
            return self._not_begun()
        try:
            problem = self._device_worker.recover(outvoted=self._grant.outvoted)
        except (LocalError, OSError) as error:
            # While the controller sees the device wait to be recovered, it lets this worker look again.
            return None if self._has_recovered() else self._returned(halt=str(error))
        self._local_trouble_s = None
        if self._unwanted():
            return self._off()
        return self._given_up(problem) if problem else self._returned(recovered=True)

    def close(self) -> None:
        """Leave the device as it was found."""
        # What began because of a signal must not be broken off by another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._executor.shut()
        self._device_worker.shut()
        self._store.close()

    def _may_go(self) -> bool:
        """Read the grant; a session of a former lease is no good under another."""
        grant = self._read_grant()
        if grant.fence != self._grant.fence and self._device_worker.is_open:
            self._let_go()
        self._grant = grant
        return self._holds(grant)

    def _read_grant(self) -> WorkerGrant:
        """Return the grant as it is now, and show the controller that this process goes on."""
        with contextlib.suppress(OSError):
            os.utime(self._plan.workers / str(self._number))
        return read_grant(self._plan.folder, self._number)

    def _holds(self, grant: WorkerGrant) -> bool:
        return grant.go and not grant.is_over and not self._is_orphan

    def _may_go_on(self) -> bool:
        grant = self._read_grant()
        return self._holds(grant) and grant.fence == self._grant.fence

    def _unwanted(self) -> bool:
        grant = self._read_grant()
        return grant.is_over or not (grant.go or grant.recover) or self._is_orphan

    @property
    def _is_orphan(self) -> bool:
        return os.getppid() != self._controller

    def _not_begun(self) -> Returned:
        if self._is_orphan:
            # Killed: nothing is to be recorded of a job that nobody waits for, and this process ends as well.
            raise KeyboardInterrupt
        return self._off()

    def _off(self) -> Returned:
        self._let_go()
        return self._returned(off=True)

    def _given_up(self, problem: str) -> Returned:
        self._let_go()
        return self._returned(given_up=problem)

    def _returned(self, **facts: Any) -> Returned:
        return Returned(self._device.serial, self._grant.fence, **facts)

    def _let_go(self) -> None:
        self._executor.forget()
        self._device_worker.close()

    def _run(self, planned: PlannedJob, following: PlannedJob | None) -> Done | None:
        """Run a job and return what came of it; None where the adb server ended meanwhile, which says nothing."""
        attempts, artifacts = self._executor.run(planned, following, self._may_go_on)
        last = attempts[-1]
        if last.verdict is Verdict.INFRA and self._is_orphan:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        if last.cause is Cause.ADB_SERVER and self._server_losses[last.job_id] < _MOST_SERVER_LOSSES:
            self._server_losses[last.job_id] += 1
            self._device_worker.ended(last)
            return None
        verdict = self._blame(planned, last)
        for attempt in attempts[:-1]:
            self._record(attempt)
        self._local_trouble_s = None
        return self._finish(*verdict, artifacts)

    def _finish(
        self,
        attempt: Attempt,
        avoid: tuple[str, ...] = (),
        outvoted: tuple[str, ...] = (),
        artifacts: tuple[ArtifactRecord, ...] = (),
    ) -> Done:
        self._record(attempt, artifacts)
        return Done(attempt, avoid, outvoted)

    def _record(self, attempt: Attempt, artifacts: tuple[ArtifactRecord, ...] = ()) -> None:
        """Record an attempt, also where the store is away for a while. Raises LeaseLostError, StoreError."""
        # A lease that ends while the store is away is taken up again, unless somebody else has the device by then.
        fence = (self._device.id, self._grant.fence) if self._grant.fence else None
        self._once_store_answers(
            lambda: self._store.record_attempt(self._plan.run_id, attempt, artifacts=artifacts, fence=fence)
        )

    def _has_recovered(self) -> bool:
        """Wait until there is room on this machine's disk again; return whether it is worth another try."""
        self._executor.forget()
        if self._local_trouble_s is None:
            self._local_trouble_s = time.monotonic()
        while time.monotonic() < self._local_trouble_s + self._plan.health.disk_wait_s:
            time.sleep(_POLL_SECONDS)
            if self._unwanted() or _has_room(self._plan.folder):
                return True
        return False

    def _blame(self, planned: PlannedJob, last: Attempt) -> Done:
        """Return the attempt with a verdict that takes in every device that tried the job. Nothing is recorded yet.

        Raises LocalError when what this device has found cannot be left for the next one.
        """
        if last.verdict is Verdict.SKIPPED:
            return Done(last, self._virtual_devices())
        if not last.device:
            return Done(last)
        failed_before = planned.failed_before or bool(last.known_issue)
        if needs_health_check(last, failed_before=failed_before):
            self._executor.finish()
            if problem := self._device_worker.check(anew=True):
                last = unfit(last, problem, self._device_worker.run.canary_cause)
                # The next job was staged in the session that ended with the canary.
                self._executor.forget()
        earlier = self._tried(last.job_id)
        history = (*earlier, tried(last))
        devices = tuple(dict.fromkeys(one.device for one in history))
        others = len(set(self._grant.others) - set(devices))
        decision = classify(history, others=others, failed_before=failed_before)
        settled = settle(last, history, decision)
        if decision.repeat:
            self._leave_to_others(last.job_id, history)
        outvoted = [one for one in earlier if is_open(one.cause)] if settled.verdict is Verdict.PASSED else []
        self._device_worker.outvote(outvoted)
        self._device_worker.ended(settled)
        return Done(settled, devices if decision.repeat else (), tuple(one.device for one in outvoted))

    def _virtual_devices(self) -> tuple[str, ...]:
        """Return the serials of this run's virtual devices, where it has hardware for what they cannot execute."""
        devices, others = self._plan.devices, self._grant.others
        if not any(one.kind == "hardware" and one.serial in others for one in devices):
            return ()
        return tuple(one.serial for one in devices if one.kind == "virtual")

    def _tried(self, job_id: str) -> tuple[Tried, ...]:
        try:
            return msgspec.json.decode(self._tried_file(job_id).read_bytes(), type=tuple[Tried, ...])
        except FileNotFoundError:
            return ()

    def _leave_to_others(self, job_id: str, history: tuple[Tried, ...]) -> None:
        """Keep what is known of a job that another device is to try. Raises LocalError."""
        file = self._tried_file(job_id)
        with local_errors(file):
            write_atomically(file, msgspec.json.encode(history))

    def _tried_file(self, job_id: str) -> Path:
        return self._plan.tried / f"{hashlib.sha256(job_id.encode()).hexdigest()}.json"


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
