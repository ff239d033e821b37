"""What one worker process does with a job: wait for the bundle, execute, judge, record."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from farm.build.bundle import load_bundle
from farm.build.cache import BundleCache
from farm.devices.connect import open_transport
from farm.engine.builds import await_reply, builds_folder, has_reply, read_reply
from farm.engine.keeper import Keeper
from farm.engine.session import STORE_VARIABLE
from farm.errors import BundleError, FarmError
from farm.execution.session import DeviceSession, RunnerOptions
from farm.options import runtime_flags
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.judge import build_failure, judge
from farm.results.rerun import after_rerun
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from farm.devices.device import Device
    from farm.engine.plan import PlannedJob, RunPlan
    from farm.execution.raw import RawResult
    from farm.execution.workspace import Workspace
    from farm.store.records import ArtifactRecord

    Execute = Callable[[str, Workspace, Path, RunnerOptions], RawResult]

_LOG_BYTES = 64 * 1024


class Worker:
    """One device, one store connection."""

    def __init__(self, plan: RunPlan, device: Device) -> None:
        self._plan, self._device = plan, device
        self._controller = os.getppid()
        self._store = open_store(os.environ[STORE_VARIABLE])
        self._cache = BundleCache(plan.cache_root)
        self._session = DeviceSession(open_transport(device), plan.runtimes[device.soc], plan.run_id, device.serial)
        self._keeper = Keeper(plan, self._session)
        self._anchor = next((anchor for anchor in plan.anchors if anchor.job.target.soc == device.soc), None)
        if self._anchor is not None and self._anchor.cached:
            self._await_anchor()
        self._staged: dict[str, Future[Workspace]] = {}
        # One thread: the cable is one, and what is staged first is needed first.
        self._aside = ThreadPoolExecutor(1, "stage")
        self._aside.submit(self._prepare)

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> Attempt:
        """Run one job, record its attempts, and return the last. `following` is staged while this one runs."""
        attempts, artifacts = self._attempts(planned, following)
        last = attempts[-1]
        if last.verdict is Verdict.INFRA and os.getppid() != self._controller:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        for attempt in attempts[:-1]:
            self._store.record_attempt(self._plan.run_id, attempt)
        self._store.record_attempt(self._plan.run_id, last, artifacts=artifacts)
        return last

    def close(self) -> None:
        """Leave the device as it was found."""
        # Ctrl-C is heard twice, from terminal and controller: the second must not break off what the first began.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._aside.shutdown(cancel_futures=True)
        self._session.close()
        self._store.close()

    def _attempts(
        self, planned: PlannedJob, following: PlannedJob | None
    ) -> tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]:
        """Return what is to be recorded of a job, and the files that belong to the last attempt."""
        job = planned.job
        try:
            workspace = self._workspace(planned)
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),), ()
        except (FarmError, OSError) as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),), ()
        if following is not None and self._is_built(following):
            self._staged[following.job.id] = self._aside.submit(self._stage, following)
        session = self._session
        first = self._execute(planned, workspace, session.execute_alone if self._plan.heap else session.execute)
        if not first.process_ended or self._plan.heap:
            return (first.attempt,), first.artifacts
        again = self._execute(planned, session.stage(workspace.bundle), session.execute_alone)
        both = after_rerun(first.attempt, again.attempt, ended_again=again.process_ended)
        return both, again.artifacts

    def _execute(self, planned: PlannedJob, workspace: Workspace, execute: Execute) -> _Executed:
        job = planned.job
        folder = self._plan.folder / "raw" / re.sub(r"[^\w.=-]", "_", job.id)
        try:
            raw = execute(job.id, workspace, folder, self._options(planned))
            attempt = judge(job, workspace.bundle, raw, operators=self._plan.profile.kept)
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

    def _prepare(self) -> None:
        """Bring what is compiled already in one go. What goes wrong here will be told by a job."""
        bundles = []
        for planned in (*self._plan.anchors, *self._plan.jobs):
            if planned.cached and planned.job.target.soc == self._device.soc:
                with contextlib.suppress(FarmError):
                    bundles.append(load_bundle(self._cache.folder(planned.key)))
        with contextlib.suppress(FarmError, OSError):
            # An anchor that is being compiled belongs into the runner's start.
            self._session.prepare(bundles, None if self._anchor or self._plan.heap else self._first_options())

    def _first_options(self) -> RunnerOptions | None:
        """Return what the runner is most likely to be asked for first."""
        here = (planned for planned in self._plan.jobs if planned.job.target.soc == self._device.soc)
        return next(map(self._options, here), None)

    def _is_built(self, planned: PlannedJob) -> bool:
        return planned.cached or has_reply(self._plan.folder, planned.key)

    def _workspace(self, planned: PlannedJob) -> Workspace:
        """Return the workspace of a job, when its bundle is there. Raises _BuildFailedError, FarmError."""
        if not self._is_built(planned) and await_reply(self._plan.folder, planned.key, self._controller) is None:
            # Killed: nothing is to be recorded of a job that nobody waits for, and this process ends as well.
            raise KeyboardInterrupt
        self._await_anchor()
        staging = self._staged.pop(planned.job.id, None) or self._aside.submit(self._stage, planned)
        return staging.result()

    def _await_anchor(self) -> None:
        """Once: let the session keep its anchor loaded, when there is one."""
        if self._anchor is None:
            return
        anchor, self._anchor = self._anchor, None
        if not self._is_built(anchor) and await_reply(self._plan.folder, anchor.key, self._controller) is None:
            raise KeyboardInterrupt
        with contextlib.suppress(FarmError):
            self._session.keep_loaded(load_bundle(self._cache.folder(anchor.key)))

    def _stage(self, planned: PlannedJob) -> Workspace:
        if not planned.cached:
            reply = read_reply(self._plan.folder, planned.key)
            if not reply.ok:
                log = builds_folder(self._plan.folder) / f"{planned.key}.log"
                raise _BuildFailedError(reply.reason, _tail(log), infra=reply.infra)
        bundle = load_bundle(self._cache.folder(planned.key))
        bundle.verify()
        if bundle.manifest.soc != self._device.soc:
            raise BundleError(f"the bundle is for {bundle.manifest.soc}, the device is a {self._device.soc}")
        return self._session.stage(bundle)


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
