"""What one worker process does with a job: wait for the bundle, execute, judge, record."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from farm.build.bundle import load_bundle
from farm.build.cache import BundleCache
from farm.devices.adb import AdbTransport
from farm.engine.builds import await_reply, builds_folder
from farm.engine.session import STORE_VARIABLE
from farm.errors import BundleError, FarmError
from farm.execution.session import DeviceSession, RunnerOptions
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.judge import build_failure, judge
from farm.store.store import open_store

if TYPE_CHECKING:
    from farm.build.bundle import Bundle
    from farm.devices.discovery import Device
    from farm.engine.plan import PlannedJob, RunPlan

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

    def run(self, planned: PlannedJob) -> Attempt:
        """Run one job, record its attempt, and return it."""
        attempt = self._attempt(planned)
        if attempt.verdict is Verdict.INFRA and os.getppid() != self._controller:
            # The devices went with the controller: that says nothing about this job.
            raise KeyboardInterrupt
        self._store.record_attempt(self._plan.run_id, attempt)
        return attempt

    def close(self) -> None:
        """Leave the device as it was found."""
        self._session.close()
        self._store.close()

    def _attempt(self, planned: PlannedJob) -> Attempt:
        job = planned.job
        try:
            bundle = self._bundle(planned)
        except _BuildFailedError as failed:
            return build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra)
        except FarmError as error:
            return build_failure(job, str(error), "", planned.key, infra=True)
        folder = self._plan.folder / "raw" / re.sub(r"[^\w.=-]", "_", job.id)
        try:
            raw = self._session.execute(job.id, bundle, folder, self._options)
            return judge(job, bundle, raw)
        except (FarmError, OSError) as error:
            return Attempt(
                job.id, Verdict.INFRA, Stage.EXECUTE, str(error), device=self._device.serial, bundle_key=planned.key
            )
        finally:
            # What it says is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(folder, ignore_errors=True)

    def _bundle(self, planned: PlannedJob) -> Bundle:
        if not planned.cached:
            reply = await_reply(self._plan.folder, planned.key, self._controller)
            if reply is None:
                # Killed: nothing is to be recorded of a job that nobody waits for, and this process ends as well.
                raise KeyboardInterrupt
            if not reply.ok:
                log = builds_folder(self._plan.folder) / f"{planned.key}.log"
                raise _BuildFailedError(reply.reason, _tail(log), infra=reply.infra)
        bundle = load_bundle(self._cache.folder(planned.key))
        bundle.verify()
        if bundle.manifest.soc != self._device.soc:
            raise BundleError(f"the bundle is for {bundle.manifest.soc}, the device is a {self._device.soc}")
        return bundle


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
