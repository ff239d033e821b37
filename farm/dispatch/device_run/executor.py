"""How one worker keeps its device busy: the next job is staged while one runs, and begun while one is recorded."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import BundleError, FarmError, LocalError, MissingPackageError, NeedsDeviceError
from farm.base.logs import end_of_log
from farm.builds.bundles.bundle import load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.execution.raw import RunnerOptions
from farm.devices.local.files import local_error
from farm.dispatch.device_run.builds import builds_folder, has_reply, read_reply
from farm.dispatch.device_run.reruns import was_refused, with_rerun
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.heap import unmeasured
from farm.results.infeasible import finalize_error, infeasible
from farm.results.judge import build_failure, not_simulated
from farm.suites.frame_settings import frame_setting, late_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from farm.builds.bundles.bundle import Bundle
    from farm.devices.execution.raw import RawResult
    from farm.dispatch.device_run.device_run import Staged
    from farm.dispatch.device_run.device_worker import DeviceWorker
    from farm.dispatch.request.plan import RunPlan
    from farm.store.cluster.records import PlannedJob
    from farm.store.records import ArtifactRecord

    Recordable = tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]

_LOG_BYTES = 64 * 1024


class Executor:
    """Executor of jobs on a device. Belongs to one thread, and has its own thread for executions."""

    def __init__(self, plan: RunPlan, device_worker: DeviceWorker) -> None:
        self._plan, self._device_run = plan, device_worker.run
        self._cache = BundleCache(plan.cache_root)
        self._staged: dict[str, Future[Staged]] = {}
        self._begun: dict[str, Future[_JobExecution]] = {}
        self._thread = ThreadPoolExecutor(1, "run")

    def has_begun(self, planned: PlannedJob) -> bool:
        """Return whether a job runs already."""
        return planned.job.id in self._begun

    def is_built(self, planned: PlannedJob) -> bool:
        """Return whether the build of a job has ended."""
        return planned.cached or has_reply(self._plan.folder, planned.key)

    def run(self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]) -> Recordable:
        """Return the records of a job, and the files of its last attempt.

        `following` is staged meanwhile. After the execution, if `may_begin` returns True, it begins as soon as the
        outputs are here, so that the device need not wait for their judgement.

        Raises LocalError for trouble of this machine, which concerns neither job nor device.
        """
        if why := self._device_run.lacks_heap:
            return (unmeasured(planned.job, planned.key, self._device_run.device.serial, why),), ()
        try:
            attempts, artifacts = self._run(planned, following, may_begin)
            folder = self._plan.folder / "raw" / f"crash-logs-{self._device_run.device.serial}"
            last, logs = self._device_run.keep_crash_logs(attempts[-1], folder)
            return (*attempts[:-1], last), (*artifacts, *logs)
        except OSError as error:
            raise local_error(error) from None

    def _run(self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]) -> Recordable:
        job = planned.job
        try:
            running = self._begun.pop(job.id, None) or self._begin(planned)
            if following is not None and self.is_built(following):
                self._staged[following.job.id] = self._stage(following)
            execution = running.result()
            if following is not None and execution.is_broken:
                # The next job was staged during trouble of the device or its connection.
                self._staged.pop(following.job.id, None)
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),), ()
        except NeedsDeviceError:
            return (not_simulated(job, load_bundle(self._cache.folder(planned.key))),), ()
        except MissingPackageError as error:
            return (build_failure(job, str(error), bundle_key=planned.key),), ()
        except LocalError:
            raise
        except FarmError as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),), ()
        if following is not None and execution.has_answer and self._may_overlap(following) and may_begin():
            self._begun[following.job.id] = self._begin(following)
        refused = self._infeasible(planned, execution)
        attempt, artifacts = self._judged(planned, execution) if refused is None else (refused, ())
        if self._plan.heap or refused is not None:
            return (attempt,), artifacts

        def again() -> tuple[Attempt, RawResult | None]:
            nonlocal artifacts
            staged = self._device_run.stage(execution.staged.workspace.bundle)
            alone = self._execute(planned, staged, alone=True)
            second, artifacts = self._judged(planned, alone)
            return second, alone.raw

        attempts = with_rerun(attempt, execution.raw, again)
        return attempts, artifacts

    def _infeasible(self, planned: PlannedJob, execution: _JobExecution) -> Attempt | None:
        """Return the attempt of a program that was refused for its frame rate alone, None for any other.

        The proof is another execution, in a process of its own: without the demand for real time it is not refused.
        """
        raw, target, bundle = execution.raw, planned.job.target, execution.staged.workspace.bundle
        flags, setting = late_flags(target), frame_setting(target.backend, dict(target.options))
        if raw is None or setting is None or not (flags and was_refused(raw) and (error := finalize_error(raw.stderr))):
            return None
        late = self._execute(planned, self._device_run.stage(bundle), alone=True, flags=flags)
        shutil.rmtree(late.folder, ignore_errors=True)
        if not late.has_answer:
            return None
        attempt = self._device_run.judge(planned.job, bundle, raw)
        shutil.rmtree(execution.folder, ignore_errors=True)
        return infeasible(attempt, setting, error)

    def forget(self) -> None:
        """Drop staged bundles, and the running execution once it has ended."""
        self.finish()
        self._begun.clear()
        self._staged.clear()

    def finish(self) -> None:
        """Wait for what runs: it is kept."""
        for running in self._begun.values():
            running.exception()

    def close(self) -> None:
        """Abort the running execution, and end the thread."""
        self._device_run.abort()
        self.forget()
        self._thread.shutdown()

    def _may_overlap(self, following: PlannedJob) -> bool:
        """Return whether a job may run while another is recorded: not where that would need the device."""
        return following.job.id in self._staged and not self._plan.heap and self._plan.optrace is None

    def _begin(self, planned: PlannedJob) -> Future[_JobExecution]:
        staging = self._staged.pop(planned.job.id, None) or self._stage(planned)
        return self._thread.submit(lambda: self._execute(planned, staging.result(), alone=self._alone(planned)))

    def _alone(self, planned: PlannedJob) -> bool:
        # The peak memory of a process covers all jobs that it ran.
        return self._plan.heap or planned.job.case.generate is not None

    def _execute(
        self, planned: PlannedJob, staged: Staged, *, alone: bool, flags: Mapping[str, str] | None = None
    ) -> _JobExecution:
        """Execute a job; `flags` of the runner replace flags of the target, in a folder with another name."""
        # Two jobs may differ in `/` and `_` alone, and one is executed while the other is judged.
        name = hashlib.sha256(planned.job.id.encode()).hexdigest()
        folder = self._plan.folder / "raw" / (f"{name}.late" if flags else name)
        options = self._options(planned)
        if flags:
            options = replace(options, flags={**options.flags, **flags})
        try:
            raw = self._device_run.execute(planned.job.id, staged, folder, options, alone=alone)
            return _JobExecution(staged, folder, raw)
        except LocalError:
            raise
        except (FarmError, ConnectionError, TimeoutError) as error:
            return _JobExecution(staged, folder, None, str(error))

    def _judged(self, planned: PlannedJob, execution: _JobExecution) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        run, raw, bundle = self._device_run, execution.raw, execution.staged.workspace.bundle
        try:
            if raw is None:
                return self._infra(planned, execution.problem), ()
            attempt = run.judge(planned.job, bundle, raw, operators=self._plan.profile.kept)
            return run.keep(attempt, bundle, execution.folder)
        except LocalError:
            raise
        except FarmError as error:
            return self._infra(planned, str(error)), ()
        finally:
            # The result is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(execution.folder, ignore_errors=True)

    def _infra(self, planned: PlannedJob, reason: str) -> Attempt:
        return Attempt(
            planned.job.id,
            Verdict.INFRA,
            Stage.EXECUTE,
            reason,
            device=self._device_run.device.serial,
            bundle_key=planned.key,
            cause=Cause.CONNECTION,
        )

    def _options(self, planned: PlannedJob) -> RunnerOptions:
        plan, target = self._plan, planned.job.target
        if plan.heap:
            flags = self._device_run.flags(target, profile=None)
            processes = 1 if plan.reducible else plan.iterations
            return RunnerOptions(processes, 0, plan.timeout_s, flags, heap=True)
        return RunnerOptions(
            iterations=plan.iterations,
            warm_up=plan.warm_up,
            timeout_s=plan.timeout_s,
            flags=self._device_run.flags(target, plan.profile),
            etdump=plan.profile.kept,
            reducible=plan.reducible,
            repeats=planned.job.case.deterministic is True,
            # A health check generates nothing.
            seconds=plan.seconds if planned.job.case.generate is not None else None,
        )

    def _stage(self, planned: PlannedJob) -> Future[Staged]:
        return self._device_run.stage_ahead(lambda: self._bundle(planned))

    def _bundle(self, planned: PlannedJob) -> Bundle:
        if not planned.cached:
            reply = read_reply(self._plan.folder, planned.key)
            if not reply.ok:
                log = builds_folder(self._plan.folder) / f"{planned.key}.log"
                raise _BuildFailedError(reply.reason, end_of_log(log, _LOG_BYTES), infra=reply.infra)
        bundle = load_bundle(self._cache.folder(planned.key))
        bundle.verify()
        soc = self._device_run.device.soc
        if bundle.manifest.soc != soc:
            raise BundleError(f"the bundle is for {bundle.manifest.soc}, the device is a {soc}")
        return bundle


class _JobExecution(NamedTuple):
    """Execution before its judgement."""

    staged: Staged
    folder: Path
    raw: RawResult | None
    """None where the farm itself failed."""
    problem: str = ""
    """Reason of a missing result."""

    @property
    def is_broken(self) -> bool:
        """True if the device or its connection failed."""
        return self.raw is None or bool(self.raw.error)

    @property
    def has_answer(self) -> bool:
        """True for a runner that executed the job and takes the next one."""
        return self.raw is not None and not (self.raw.error or self.raw.process_ended or self.raw.refused)


class _BuildFailedError(Exception):
    def __init__(self, reason: str, log: str, *, infra: bool) -> None:
        self.reason, self.log, self.infra = reason, log, infra
        super().__init__(reason)
