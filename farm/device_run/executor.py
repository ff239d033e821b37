"""How one worker keeps its device busy: the next job is staged while one runs, and begun while one is recorded."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.bundles.bundle import load_bundle
from farm.bundles.cache import BundleCache
from farm.device_run.artifacts import AttemptArtifacts
from farm.device_run.builds import builds_folder, has_reply, read_reply
from farm.devices.local.files import local_error
from farm.errors import BundleError, FarmError, LocalError
from farm.execution.session import RunnerOptions
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.results.blame import damaged
from farm.results.judge import build_failure, judge
from farm.results.rerun import after_rerun
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from farm.device_run.device_worker import DeviceWorker
    from farm.execution.raw import RawResult
    from farm.execution.session import DeviceSession
    from farm.execution.workspace import Workspace
    from farm.request.plan import PlannedJob, RunPlan
    from farm.store.records import ArtifactRecord

    Execute = Callable[[str, Workspace, Path, RunnerOptions], RawResult]

_LOG_BYTES = 64 * 1024


class Executor:
    """Runs jobs on the device of a station. Belongs to one thread, and has one of its own for what runs there."""

    def __init__(self, plan: RunPlan, station: DeviceWorker) -> None:
        self._plan, self._station = plan, station
        self._device = station.device
        self._cache = BundleCache(plan.cache_root)
        self.keeper = AttemptArtifacts(plan, lambda: station.session)
        self._staged: dict[str, Future[Workspace]] = {}
        self._begun: dict[str, Future[_Ran]] = {}
        self._thread = ThreadPoolExecutor(1, "run")

    def has_begun(self, planned: PlannedJob) -> bool:
        """Tell whether a job runs already."""
        return planned.job.id in self._begun

    def is_built(self, planned: PlannedJob) -> bool:
        """Tell whether the build of a job has ended."""
        return planned.cached or has_reply(self._plan.folder, planned.key)

    def run(
        self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]
    ) -> tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]:
        """Return what is to be recorded of a job, and the files that belong to the last attempt.

        `following` is staged meanwhile. Where the runner answered and `may_begin` has nothing against it, it begins as
        soon as the outputs are here, so that the device need not wait for what is done with them.

        Raises LocalError for trouble of this machine, which says nothing about the job or the device.
        """
        try:
            return self._run(planned, following, may_begin)
        except OSError as error:
            raise local_error(error) from None

    def _run(
        self, planned: PlannedJob, following: PlannedJob | None, may_begin: Callable[[], bool]
    ) -> tuple[tuple[Attempt, ...], tuple[ArtifactRecord, ...]]:
        job = planned.job
        try:
            running = self._begun.pop(job.id, None) or self._begin(planned)
            if following is not None and self.is_built(following):
                self._staged[following.job.id] = self._stage(following)
            ran = running.result()
        except _BuildFailedError as failed:
            return (build_failure(job, failed.reason, failed.log, planned.key, infra=failed.infra),), ()
        except LocalError:
            raise
        except FarmError as error:
            return (build_failure(job, str(error), "", planned.key, infra=True),), ()
        if following is not None and _has_answer(ran) and self._may_overlap(following) and may_begin():
            self._begun[following.job.id] = self._begin(following)
        first = self._judged(planned, ran)
        if not first.process_ended or self._plan.heap:
            return (first.attempt,), first.artifacts
        session = self._station.session
        again = self._judged(planned, self._execute(planned, session.stage(ran.workspace.bundle), session, alone=True))
        both = after_rerun(first.attempt, again.attempt, ended_again=again.process_ended)
        return both, again.artifacts

    def forget(self) -> None:
        """Let go of what was staged, and of what runs, once it has ended."""
        self.finish()
        self._begun.clear()
        self._staged.clear()

    def finish(self) -> None:
        """Wait for what runs: it is kept."""
        for running in self._begun.values():
            running.exception()

    def shut(self) -> None:
        """Let go for good; what still runs is broken off."""
        self._station.break_off()
        self.forget()
        self._thread.shutdown()

    def _may_overlap(self, following: PlannedJob) -> bool:
        """Tell whether a job may run while another is recorded: not where that would need the device."""
        return following.job.id in self._staged and not self._plan.heap and self._plan.optrace is None

    def _begin(self, planned: PlannedJob) -> Future[_Ran]:
        session = self._station.session
        staging = self._staged.pop(planned.job.id, None) or self._stage(planned)

        def run() -> _Ran:
            workspace = staging.result()
            return self._execute(planned, workspace, session, alone=self._plan.heap, waited=self._station.gate())

        return self._thread.submit(run)

    def _execute(
        self, planned: PlannedJob, workspace: Workspace, session: DeviceSession, *, alone: bool, waited: str = ""
    ) -> _Ran:
        execute = session.execute_alone if alone else session.execute
        folder = self._plan.folder / "raw" / re.sub(r"[^\w.=-]", "_", planned.job.id)
        try:
            return _Ran(workspace, folder, execute(planned.job.id, workspace, folder, self.options(planned)), waited)
        except LocalError:
            raise
        except (FarmError, ConnectionError, TimeoutError) as error:
            return _Ran(workspace, folder, None, str(error))

    def _judged(self, planned: PlannedJob, ran: _Ran) -> _Executed:
        job, raw, note = planned.job, ran.raw, ran.note
        try:
            if raw is None:
                return _Executed(self._infra(planned, note))
            attempt = judge(job, ran.workspace.bundle, raw, operators=self._plan.profile.kept)
            if attempt.verdict is Verdict.FAILED and attempt.cause in (Cause.NUMERICS, Cause.REFUSED):
                # What a file that is not what was pushed, or pulled, leads to says nothing about the code.
                self.finish()
                what = self._station.session.find_damage(ran.workspace.bundle, raw)
                attempt = damaged(attempt, what) if what else attempt
            if note:
                attempt = msgspec.structs.replace(attempt, notes=(*attempt.notes, note))
            attempt, artifacts = self.keeper.keep(attempt, planned, ran.workspace.bundle, ran.folder)
            return _Executed(attempt, raw.process_ended, artifacts)
        except LocalError:
            raise
        except FarmError as error:
            return _Executed(self._infra(planned, str(error)))
        finally:
            # What it says is in the store now; raw outputs of every run would fill the disk.
            shutil.rmtree(ran.folder, ignore_errors=True)

    def _infra(self, planned: PlannedJob, reason: str) -> Attempt:
        return Attempt(
            planned.job.id,
            Verdict.INFRA,
            Stage.EXECUTE,
            reason,
            device=self._device.serial,
            bundle_key=planned.key,
            cause=Cause.CONNECTION,
        )

    def options(self, planned: PlannedJob) -> RunnerOptions:
        """Return how the runner is asked to run a job."""
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

    def _stage(self, planned: PlannedJob) -> Future[Workspace]:
        session = self._station.session
        return self._station.stage(lambda: self._staged_on(session, planned))

    def _staged_on(self, session: DeviceSession, planned: PlannedJob) -> Workspace:
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


def _has_answer(ran: _Ran) -> bool:
    return ran.raw is not None and not ran.raw.error and not ran.raw.process_ended


class _Ran(NamedTuple):
    """One execution, not judged yet."""

    workspace: Workspace
    folder: Path
    raw: RawResult | None
    """None where the farm itself failed."""
    note: str
    """What the device was waited for; or why there is no result."""


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
