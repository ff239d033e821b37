"""What one worker process does with a job: wait for the bundle, execute, judge, record."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from farm.build.bundle import load_bundle
from farm.build.cache import BundleCache
from farm.devices.adb import AdbTransport
from farm.engine.builds import await_reply, builds_folder, has_reply, read_reply
from farm.engine.session import STORE_VARIABLE
from farm.errors import BundleError, FarmError
from farm.execution.session import DeviceSession, RunnerOptions
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.judge import build_failure, judge
from farm.results.rerun import after_rerun
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from farm.devices.discovery import Device
    from farm.engine.plan import PlannedJob, RunPlan
    from farm.execution.raw import RawResult
    from farm.execution.workspace import Workspace

    Execute = Callable[[str, Workspace, Path, RunnerOptions], RawResult]

_LOG_BYTES = 64 * 1024


class Worker:
    """One device, one store connection."""

    def __init__(self, plan: RunPlan, device: Device) -> None:
        self._plan, self._device = plan, device
        self._controller = os.getppid()
        self._store = open_store(os.environ[STORE_VARIABLE])
        self._cache = BundleCache(plan.cache_root)
        self._session = DeviceSession(
            AdbTransport(device.serial, device.adb_port), plan.runtimes[device.soc], plan.run_id, device.serial
        )
        # Cycles need detailed profiling. The simulator's speed does not change with it; that of hardware would.
        flags = {"profile_level": "2"} if device.kind == "virtual" else {}
        self._options = RunnerOptions(
            iterations=plan.iterations, warm_up=plan.warm_up, timeout_s=plan.timeout_s, flags=flags
        )
        self._anchor = next((anchor for anchor in plan.anchors if anchor.job.target.soc == device.soc), None)
        if self._anchor is not None and self._anchor.cached:
            self._await_anchor()
        self._staged: dict[str, Future[Workspace]] = {}
        # One thread: the cable is one, and what is staged first is needed first.
        self._aside = ThreadPoolExecutor(1, "stage")
        self._aside.submit(self._prepare)

    def run(self, planned: PlannedJob, following: PlannedJob | None = None) -> Attempt:
        """Run one job, record its attempts, and return the last. `following` is staged while this one runs."""
        attempts = self._attempts(planned, following)
        if attempts[-1].verdict is Verdict.INFRA and os.getppid() != self._controller:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        for attempt in attempts:
            self._store.record_attempt(self._plan.run_id, attempt)
        return attempts[-1]

    def close(self) -> None:
        """Leave the device as it was found."""
        # Ctrl-C is heard twice, from terminal and controller: the second must not break off what the first began.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._aside.shutdown(cancel_futures=True)
        self._session.close()
        self._store.close()

    def _attempts(self, planned: PlannedJob, following: PlannedJob | None) -> tuple[Attempt, ...]:
        job = planned.job
        try:
            workspace = self._workspace(planned)
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),)
        except (FarmError, OSError) as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),)
        if following is not None and self._is_built(following):
            self._staged[following.job.id] = self._aside.submit(self._stage, following)
        first, ended = self._execute(planned, workspace, self._session.execute)
        if not ended:
            return (first,)
        again = self._session.stage(workspace.bundle)
        second, ended = self._execute(planned, again, self._session.execute_alone)
        return after_rerun(first, second, ended_again=ended)

    def _execute(self, planned: PlannedJob, workspace: Workspace, execute: Execute) -> tuple[Attempt, bool]:
        """Return the attempt, and whether the runner ended with it."""
        job = planned.job
        folder = self._plan.folder / "raw" / re.sub(r"[^\w.=-]", "_", job.id)
        try:
            raw = execute(job.id, workspace, folder, self._options)
            return judge(job, workspace.bundle, raw), raw.process_ended
        except (FarmError, OSError) as error:
            attempt = Attempt(
                job.id, Verdict.INFRA, Stage.EXECUTE, str(error), device=self._device.serial, bundle_key=planned.key
            )
            return attempt, False
        finally:
            # What it says is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(folder, ignore_errors=True)

    def _prepare(self) -> None:
        """Bring what is compiled already in one go. What goes wrong here will be told by a job."""
        bundles = []
        for planned in (*self._plan.anchors, *self._plan.jobs):
            if planned.cached and planned.job.target.soc == self._device.soc:
                with contextlib.suppress(FarmError):
                    bundles.append(load_bundle(self._cache.folder(planned.key)))
        with contextlib.suppress(FarmError, OSError):
            # An anchor that is being compiled belongs into the runner's start.
            self._session.prepare(bundles, None if self._anchor else self._options)

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
