"""What one worker process does with a job: wait for the bundle, execute, judge, blame, record."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.build.bundle import load_bundle
from farm.build.cache import BundleCache
from farm.engine.builds import await_reply, builds_folder, has_reply, read_reply
from farm.engine.keeper import Keeper
from farm.engine.permits import Permit, read_permit
from farm.engine.session import STORE_VARIABLE
from farm.engine.station import Station
from farm.errors import BundleError, FarmError, LeaseLostError
from farm.execution.evidence import collect_evidence
from farm.execution.session import RunnerOptions
from farm.options import runtime_flags
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.blame import Tried, classify, damaged, settle, tried
from farm.results.judge import build_failure, judge
from farm.results.rerun import after_rerun
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from farm.engine.plan import PlannedJob, RunPlan
    from farm.execution.raw import RawResult
    from farm.execution.session import DeviceSession
    from farm.execution.workspace import Workspace
    from farm.store.records import ArtifactRecord

    Execute = Callable[[str, Workspace, Path, RunnerOptions], RawResult]

_LOG_BYTES = 64 * 1024


class Done(NamedTuple):
    """A job that was tried here."""

    attempt: Attempt
    avoid: tuple[str, ...] = ()
    """Serials of the devices that have tried it, when another one should."""


class Returned(NamedTuple):
    """A job that was not begun, as the device may not be used."""

    device: str
    off: bool = False
    """Nothing of ours is on the device any more."""
    ailing: str = ""
    """What is wrong with the device: it has to be mended first."""
    mended: bool = False
    given_up: str = ""
    """Why the device is of no use to this run."""

    def shown(self) -> dict[str, str | bool]:
        """Return it for a report."""
        return self._asdict()


class Worker:
    """One device, one store connection."""

    def __init__(self, plan: RunPlan, number: int) -> None:
        self._plan, self._number = plan, number
        self._device = plan.devices[number]
        self._controller = os.getppid()
        self._store = open_store(os.environ[STORE_VARIABLE])
        self._cache = BundleCache(plan.cache_root)
        self._station = Station(plan, number, self._store, self._unwanted)
        self._keeper = Keeper(plan, lambda: self._station.session)
        self._permit = Permit(go=False)
        self._staged: dict[str, Future[Workspace]] = {}
        if self._may_go():
            # While the first job is on its way.
            self._station.begin()

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> Done | Returned:
        """Run one job, record its attempts, and return the last. `following` is staged while this one runs."""
        if not self._may_go():
            # What is to be mended is mended when no job is kept waiting by it.
            return Returned(self._device.serial) if self._permit.mend else self._off()
        self._station.await_canary()
        if not self._is_built(planned) and await_reply(self._plan.folder, planned.key, self._unwanted) is None:
            return self._not_begun()
        problem = self._station.check()
        if self._unwanted():
            return self._not_begun()
        if problem:
            self._staged.clear()
            return self._given_up(problem) if self._station.given_up else Returned(self._device.serial, ailing=problem)
        try:
            return self._run(planned, following)
        except LeaseLostError:
            return self._off()

    def look(self) -> Returned | None:
        """Mend the device, or let go of it, where the controller says so, and return what came of it."""
        if self._may_go():
            return None
        if not self._permit.mend:
            return self._off()
        problem = self._station.mend()
        if self._unwanted():
            return self._off()
        return self._given_up(problem) if problem else Returned(self._device.serial, mended=True)

    def close(self) -> None:
        """Leave the device as it was found."""
        # What began because of a signal must not be broken off by another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._station.shut()
        self._store.close()

    def _may_go(self) -> bool:
        """Read the permit; a session of a former lease is no good under another."""
        permit = read_permit(self._plan.folder, self._number)
        if permit.fence != self._permit.fence and self._station.is_open:
            self._let_go()
        self._permit = permit
        return permit.go

    def _unwanted(self) -> bool:
        if os.getppid() != self._controller:
            return True
        permit = read_permit(self._plan.folder, self._number)
        return not (permit.go or permit.mend)

    def _not_begun(self) -> Returned:
        if os.getppid() != self._controller:
            # Killed: nothing is to be recorded of a job that nobody waits for, and this process ends as well.
            raise KeyboardInterrupt
        return self._off()

    def _off(self) -> Returned:
        self._let_go()
        return Returned(self._device.serial, off=True)

    def _given_up(self, problem: str) -> Returned:
        self._let_go()
        return Returned(self._device.serial, given_up=problem)

    def _let_go(self) -> None:
        self._staged.clear()
        self._station.close()

    def _run(self, planned: PlannedJob, following: PlannedJob | None) -> Done:
        attempts, artifacts = self._attempts(planned, following)
        last = attempts[-1]
        if last.verdict is Verdict.INFRA and os.getppid() != self._controller:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        last, avoid = self._blame(last)
        artifacts = (*artifacts, *self._evidence(last))
        fence = (self._device.id, self._permit.fence) if self._permit.fence else None
        for attempt in attempts[:-1]:
            self._store.record_attempt(self._plan.run_id, attempt, fence=fence)
        self._store.record_attempt(self._plan.run_id, last, artifacts=artifacts, fence=fence)
        return Done(last, avoid)

    def _evidence(self, last: Attempt) -> tuple[ArtifactRecord, ...]:
        """Keep what the logs say of a job that ended the runner, or after which the device was not the same."""
        if last.cause not in (Cause.CRASH, Cause.HANG, Cause.GONE):
            return ()
        folder = self._plan.folder / "raw" / f"evidence-{self._number}"
        try:
            since = last.started_ms / 1000
            files = collect_evidence(self._station.transport, self._device.os, folder, since=since)
            return self._keeper.keep_evidence(files)
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

    def _attempts(
        self, planned: PlannedJob, following: PlannedJob | None
    ) -> tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]:
        """Return what is to be recorded of a job, and the files that belong to the last attempt."""
        job, session = planned.job, self._station.session
        try:
            staging = self._staged.pop(job.id, None) or self._station.stage(lambda: self._stage(planned, session))
            waited = self._station.gate()
            workspace = staging.result()
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),), ()
        except (FarmError, OSError) as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),), ()
        if following is not None and self._is_built(following):
            self._staged[following.job.id] = self._station.stage(lambda: self._stage(following, session))
        first = self._execute(planned, workspace, session.execute_alone if self._plan.heap else session.execute, waited)
        if not first.process_ended or self._plan.heap:
            return (first.attempt,), first.artifacts
        again = self._execute(planned, session.stage(workspace.bundle), session.execute_alone, waited)
        both = after_rerun(first.attempt, again.attempt, ended_again=again.process_ended)
        return both, again.artifacts

    def _execute(self, planned: PlannedJob, workspace: Workspace, execute: Execute, waited: str) -> _Executed:
        job = planned.job
        folder = self._plan.folder / "raw" / re.sub(r"[^\w.=-]", "_", job.id)
        try:
            raw = execute(job.id, workspace, folder, self._options(planned))
            attempt = judge(job, workspace.bundle, raw, operators=self._plan.profile.kept)
            if attempt.verdict is Verdict.FAILED and attempt.cause in (Cause.NUMERICS, Cause.REFUSED):
                # What a file that is not what was pushed, or pulled, leads to says nothing about the code.
                what = self._station.session.find_damage()
                attempt = damaged(attempt, what) if what else attempt
            if waited:
                attempt = msgspec.structs.replace(attempt, notes=(*attempt.notes, waited))
            attempt, artifacts = self._keeper.keep(attempt, planned, workspace.bundle, folder)
            return _Executed(attempt, raw.process_ended, artifacts)
        except (FarmError, OSError) as error:
            attempt = Attempt(
                job.id, Verdict.INFRA, Stage.EXECUTE, str(error), device=self._device.serial, bundle_key=planned.key
            )
            return _Executed(attempt)
        finally:
            # What it says is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(folder, ignore_errors=True)

    def _options(self, planned: PlannedJob) -> RunnerOptions:
        plan, profile = self._plan, self._plan.profile
        flags = runtime_flags(planned.job.target)
        if plan.heap:
            return RunnerOptions(iterations=1, warm_up=0, timeout_s=plan.timeout_s, flags=flags, heap=True)
        return RunnerOptions(
            iterations=plan.iterations,
            warm_up=plan.warm_up,
            timeout_s=plan.timeout_s,
            flags={**flags, **profile.flags(self._device.kind)},
            etdump=profile.kept,
        )

    def _is_built(self, planned: PlannedJob) -> bool:
        return planned.cached or has_reply(self._plan.folder, planned.key)

    def _stage(self, planned: PlannedJob, session: DeviceSession) -> Workspace:
        if not planned.cached:
            reply = read_reply(self._plan.folder, planned.key)
            if not reply.ok:
                log = builds_folder(self._plan.folder) / f"{planned.key}.log"
                raise _BuildFailedError(reply.reason, _tail(log), infra=reply.infra)
        bundle = load_bundle(self._cache.folder(planned.key))
        bundle.verify()
        if bundle.manifest.soc != self._device.soc:
            raise BundleError(f"the bundle is for {bundle.manifest.soc}, the device is a {self._device.soc}")
        return session.stage(bundle)


class _Executed(NamedTuple):
    """One execution, judged."""

    attempt: Attempt
    process_ended: bool = False
    """The runner ended with it."""
    artifacts: tuple[ArtifactRecord, ...] = ()


class _BuildFailedError(Exception):
    def __init__(self, reason: str, log: str, *, infra: bool) -> None:
        self.reason, self.log, self.infra = reason, log, infra
        super().__init__(reason)


def _tail(path: object) -> str:
    try:
        with open(str(path), "rb") as file:  # noqa: PTH123
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
