"""What one worker process does with a job: ask whether it may, wait for the bundle, execute, blame, record."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.engine.builds import await_reply
from farm.engine.executor import Executor
from farm.engine.permits import Permit, read_permit
from farm.engine.session import STORE_VARIABLE
from farm.engine.station import Station
from farm.errors import LeaseLostError, StoreError
from farm.execution.evidence import collect_evidence
from farm.results.attempt import Attempt, Cause, Verdict
from farm.results.blame import Tried, classify, settle, tried
from farm.store.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from farm.engine.plan import PlannedJob, RunPlan
    from farm.store.records import ArtifactRecord

# As long as a database server takes to start again.
_STORE_SECONDS = 30.0


class Done(NamedTuple):
    """A job that was tried here."""

    attempt: Attempt
    avoid: tuple[str, ...] = ()
    """Serials of the devices that have tried it, when another one should."""


class Returned(NamedTuple):
    """A job that was not begun, as the device may not be used."""

    device: str
    fence: int = 0
    """Of the lease that it is about."""
    off: bool = False
    """Nothing of ours is on the device any more."""
    ailing: str = ""
    """What is wrong with the device: it has to be mended first."""
    mended: bool = False
    given_up: str = ""
    """Why the device is of no use to this run."""

    def shown(self) -> dict[str, str | int | bool]:
        """Return it for a report."""
        return self._asdict()


class Worker:
    """One device, one store connection."""

    def __init__(self, plan: RunPlan, number: int, controller: int) -> None:
        """`controller` is the id of the process that gives permits: none of them holds when it is gone."""
        self._plan, self._number, self._controller = plan, number, controller
        self._device = plan.devices[number]
        self._store_is_broken = False
        self._store = open_store(os.environ[STORE_VARIABLE])
        self._station = Station(plan, number, self._store, self._unwanted)
        self._executor = Executor(plan, self._station)
        self._permit = Permit(go=False)
        if self._may_go():
            # While the first job is on its way.
            self._station.begin()

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> Done | Returned:
        """Run one job, record its attempts, and return the last. `following` is staged while this one runs."""
        may_go = self._may_go()
        # What has begun is finished, whatever was said since.
        returned = None if self._executor.has_begun(planned) else self._get_ready(planned, may_go=may_go)
        if returned is not None:
            return returned
        try:
            return self._run(planned, following if may_go else None)
        except LeaseLostError:
            return self._off()

    def _get_ready(self, planned: PlannedJob, *, may_go: bool) -> Returned | None:
        """Wait until a job can begin; or return why it cannot, here and now."""
        if not may_go:
            # What is to be mended is mended when no job is kept waiting by it.
            return self._returned() if self._permit.mend else self._off()
        self._station.await_canary()
        built = self._executor.is_built(planned)
        if not built and await_reply(self._plan.folder, planned.key, self._unwanted) is None:
            return self._not_begun()
        problem = self._station.check()
        if self._unwanted():
            return self._not_begun()
        if not problem:
            return None
        self._executor.forget()
        return self._given_up(problem) if self._station.given_up else self._returned(ailing=problem)

    def look(self) -> Returned | None:
        """Mend the device, or let go of it, where the controller says so, and return what came of it."""
        if self._may_go():
            return None
        if not self._permit.mend:
            return self._off()
        problem = self._station.mend()
        if self._unwanted():
            return self._off()
        return self._given_up(problem) if problem else self._returned(mended=True)

    def close(self) -> None:
        """Leave the device as it was found."""
        # What began because of a signal must not be broken off by another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._executor.shut()
        self._station.shut()
        self._store.close()

    def _may_go(self) -> bool:
        """Read the permit; a session of a former lease is no good under another."""
        permit = read_permit(self._plan.folder, self._number)
        if permit.fence != self._permit.fence and self._station.is_open:
            self._let_go()
        self._permit = permit
        return self._holds(permit)

    def _holds(self, permit: Permit) -> bool:
        return permit.go and not permit.is_over and not self._is_orphan

    def _may_go_on(self) -> bool:
        permit = read_permit(self._plan.folder, self._number)
        return self._holds(permit) and permit.fence == self._permit.fence

    def _unwanted(self) -> bool:
        permit = read_permit(self._plan.folder, self._number)
        return permit.is_over or not (permit.go or permit.mend) or self._is_orphan

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
        return Returned(self._device.serial, self._permit.fence, **facts)

    def _let_go(self) -> None:
        self._executor.forget()
        self._station.close()

    def _run(self, planned: PlannedJob, following: PlannedJob | None) -> Done:
        attempts, artifacts = self._executor.run(planned, following, self._may_go_on)
        last = attempts[-1]
        if last.verdict is Verdict.INFRA and self._is_orphan:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        last, avoid = self._blame(last)
        artifacts = (*artifacts, *self._evidence(last))
        for attempt in attempts[:-1]:
            self._record(attempt)
        self._record(last, artifacts)
        return Done(last, avoid)

    def _record(self, attempt: Attempt, artifacts: tuple[ArtifactRecord, ...] = ()) -> None:
        """Record an attempt, also where the store is away for a while. Raises LeaseLostError, StoreError."""
        fence = (self._device.id, self._permit.fence) if self._permit.fence else None
        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            try:
                self._store.record_attempt(self._plan.run_id, attempt, artifacts=artifacts, fence=fence)
            except StoreError:
                # Once it was waited for in vain, as with a full disk, the next job need not wait as long.
                if self._store_is_broken or time.monotonic() > deadline:
                    self._store_is_broken = True
                    raise
                time.sleep(1.0)
            else:
                self._store_is_broken = False
                return

    def _evidence(self, last: Attempt) -> tuple[ArtifactRecord, ...]:
        """Keep what the logs say of a job that ended the runner, or after which the device was not the same."""
        if last.cause not in (Cause.CRASH, Cause.HANG, Cause.GONE):
            return ()
        folder = self._plan.folder / "raw" / f"evidence-{self._number}"
        try:
            since = last.started_ms / 1000
            files = collect_evidence(self._station.transport, self._device.os, folder, since=since)
            return self._executor.keeper.keep_evidence(files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _blame(self, last: Attempt) -> tuple[Attempt, tuple[str, ...]]:
        """Return the attempt with a verdict that has heard every device that tried the job, and who they are.

        They are empty when nobody else needs to try.
        """
        if not last.device:
            return last, ()
        earlier = self._tried(last.job_id)
        history = (*earlier, tried(last))
        devices = tuple(dict.fromkeys(one.device for one in history))
        others = len(set(self._permit.others) - set(devices))
        settled = settle(last, history, others=others)
        if settled.verdict is Verdict.PASSED:
            self._station.outvote([one for one in earlier if one.cause in (Cause.CRASH, Cause.HANG)])
        self._station.ended(settled)
        if not classify(history, others=others).repeat:
            return settled, ()
        self._tried_file(last.job_id).write_bytes(msgspec.json.encode(history))
        return settled, devices

    def _tried(self, job_id: str) -> tuple[Tried, ...]:
        try:
            return msgspec.json.decode(self._tried_file(job_id).read_bytes(), type=tuple[Tried, ...])
        except FileNotFoundError:
            return ()

    def _tried_file(self, job_id: str) -> Path:
        return self._plan.tried / f"{hashlib.sha256(job_id.encode()).hexdigest()}.json"
