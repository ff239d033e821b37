"""`farm run` on this machine, from names to exit code: `run`, `_Run.execute`, `_Run._on_devices`, in order.

`LocalRun` has dispatcher, device processes, result log and recorder of the jobs; `Wait` is the wait for devices.
`farm.dispatch.run.steps` has the steps common with runs on a shared farm.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import Counter
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import ExitCode, FarmError, LeaseLostError, NoDeviceError, RowRefusedError
from farm.base.interrupts import INTERRUPTED, InterruptHandler, handling, noticing_deaths
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.runtime.native import NativeBuild, native_of
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.dispatcher import Dispatcher, ProgressListener
from farm.dispatch.local_jobs import LocalJobs
from farm.dispatch.messages import ForkedProcess
from farm.dispatch.pool.fleet import Fleet, attached_fleet, virtual_fleet
from farm.dispatch.recorder import Recorder, ResultLog
from farm.dispatch.request.choose import device_kind_of, narrow, optrace_tools
from farm.dispatch.request.records import exit_code_of, in_progress, require_same_conditions, require_same_runtimes
from farm.dispatch.request.request import RunOutcome, RunPlan, RunRequest
from farm.dispatch.request.selection import Budget
from farm.dispatch.run.compiling import builders
from farm.dispatch.run.steps import RunSteps, choose, finished_outcome, left_of, log_numbers, take_secrets
from farm.policy.situation import Priority
from farm.report.model.format import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.base.fork_server import ForkServer
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.devices.device import Device
    from farm.dispatch.pool.device_pool import DevicePool
    from farm.store.cluster.records import PlannedJob, ShardResult
    from farm.store.records import DeviceView
    from farm.store.store import Store
    from farm.suites.suite import Job

logger = logging.getLogger(__name__)

# Reading the identity of every device disturbs measurements of other users.
_RESCAN_SECONDS = 15.0
# A request without waiting has this grace: the leases of free devices take a moment.
_GRACE_SECONDS = 5.0


class Wait:
    """How long a run waits for devices; begins when it is made."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds` is None for a run that waits for busy devices as long as it may, and for absent ones not at all."""
        self._seconds = seconds
        self._end_s = float("inf") if seconds is None else time.monotonic() + seconds

    def fleet(self, first: Callable[[], Fleet], again: Callable[[bool], Fleet]) -> Fleet:
        """Return the devices as soon as every SoC has an attached device, or all devices at the end of the wait.

        `first` and `again` find them; `again` takes whether some SoCs may be without. Raises NoDeviceError when none
        has any.
        """
        try:
            return first()
        except NoDeviceError as error:
            if self._seconds is None:
                raise
            logger.info("waiting up to %s: %s", duration(self._seconds), error)
        while (left := self._end_s - time.monotonic()) > 0:
            time.sleep(min(_RESCAN_SECONDS, left))
            with suppress(NoDeviceError):
                return again(False)
        return again(True)

    def acquire(self, pool: DevicePool, socs: Collection[str], until_s: float) -> frozenset[str]:
        """Wait for a lease of a device of every SoC; return the SoCs that are given up as none became free.

        `until_s` is when the run's time is over, on the clock of `time.monotonic`. Raises NoDeviceError when no SoC
        has any.
        """
        if self._seconds is None:
            pool.acquire(until_s)
            return frozenset()
        pool.acquire(min(until_s, max(self._end_s, time.monotonic() + _GRACE_SECONDS)), partly=True)
        lacking = frozenset(socs) - {device.soc for device in pool.held()}
        if lacking:
            names = " and no ".join(sorted(lacking))
            reason = f"no {names} became free within {duration(self._seconds)}: {pool.holders(lacking)}"
            if lacking == frozenset(socs):
                raise NoDeviceError(reason)
            pool.give_up(lacking, reason)
        return lacking


_LAST_SECONDS = 5.0
"""For the last results, after every device is left."""


class LocalRecords:
    """Results of a run on this machine in the store."""

    def __init__(self, run_id: str, store: Store) -> None:
        self._run_id, self._store = run_id, store
        self._recorded: set[tuple[int, str]] = set()
        """Results of the present batch that are recorded, by shard and job."""

    def record(self, results: Sequence[ShardResult]) -> Mapping[int, FarmError]:
        """Record the attempts of results under their fences; return the reason for each refused result, by index.

        Raises StoreError; the next call with the same results goes on after the recorded results.
        """
        refused: dict[int, FarmError] = {}
        try:
            # In one transaction; one refused result refuses it, and then each result has its own.
            self._record(results)
        except (LeaseLostError, RowRefusedError):
            for index, result in enumerate(results):
                try:
                    self._record([result])
                except (LeaseLostError, RowRefusedError) as error:
                    refused[index] = error
        self._recorded.clear()
        return refused

    def _record(self, results: Sequence[ShardResult]) -> None:
        left = [result for result in results if (result.shard, result.job_id) not in self._recorded]
        attempts = [one for result in left for one in result.attempts_with_artifacts]
        fences = {(result.device, result.fence) for result in left if result.fence}
        self._store.record_attempts(self._run_id, attempts, fences=fences)
        self._recorded.update((result.shard, result.job_id) for result in left)


class LocalRun:
    """Run of one plan. `run` belongs to the main thread."""

    def __init__(
        self,
        plan: RunPlan,
        pool: DevicePool,
        store: Store,
        listener: ProgressListener,
        *,
        forks: ForkServer,
        most_failures: int = 0,
    ) -> None:
        """`forks` makes device processes. After `most_failures` failed jobs nothing begins."""
        self._plan, self._pool, self._store = plan, pool, store
        self._forks = forks
        self._dispatcher = Dispatcher(self._process)
        self._jobs = LocalJobs(plan, pool, self._dispatcher, listener, most_failures)
        self._log = ResultLog(result_log(plan.folder))
        record = LocalRecords(plan.run_id, store).record
        self._recorder = Recorder(
            record, self._log, None, recorded=self._jobs.recorded, failing=self._jobs.store_failing
        )
        self._runners = [
            DeviceRunner(device, self._jobs, self._dispatcher, linger_s=math.inf, rest_s=math.inf)
            for device in plan.devices
        ]

    def finish_running(self) -> None:
        """Begin no other job; running jobs are finished. Safe in a signal handler, and in any thread."""
        self._dispatcher.post(self._jobs.finish_running)

    def run(self) -> frozenset[str]:
        """Run every job, and leave every device, also after KeyboardInterrupt.

        Return the ids of jobs for which no device was left.
        """
        try:
            with noticing_deaths(self._thread_died):
                self._recorder.begin()
                self._jobs.begin(self._runners, self._recorder, self._store.devices.record_health)
                self._pool.begin(self._jobs.pool_changed)
                self._dispatcher.run(lambda: self._jobs.is_over, self._tick)
        finally:
            self._close()
        return frozenset(self._jobs.abandoned)

    def _thread_died(self, why: str) -> None:
        self._dispatcher.post(lambda: self._jobs.halt(why))

    def _tick(self) -> None:
        for runner in self._runners:
            runner.tick()

    def _close(self) -> None:
        # Ctrl-C does not wait for them.
        threads = ThreadPoolExecutor(len(self._runners))
        futures.wait([threads.submit(runner.close) for runner in self._runners])
        self._recorder.close(_LAST_SECONDS)
        self._log.close()

    def _process(self, device: Device) -> ForkedProcess:
        number = self._plan.devices.index(device)
        return ForkedProcess(self._forks, self._plan.folder / "logs" / f"device-{number}.log")


def result_log(run_folder: Path) -> Path:
    """Return the file of the result log of a run."""
    return run_folder / "results.log"


def replay_results(run_id: str, run_folder: Path, store: Store) -> None:
    """Record the results that a killed run left in its log. Raises StoreError."""
    if not result_log(run_folder).exists():
        return
    log = ResultLog(result_log(run_folder))
    try:
        recorder = Recorder(LocalRecords(run_id, store).record, log, None)
        recorder.begin()
        recorder.close(_LAST_SECONDS)
    finally:
        log.close()


def run(
    config: Config,
    request: RunRequest,
    listener: ProgressListener,
    *,
    interrupts: InterruptHandler | None = None,
    begun: Callable[[str], None] = lambda _: None,
    only: Collection[str] | None = None,
) -> RunOutcome:
    """Run the jobs of `request` and return the outcome; all started processes are ended.

    `interrupts` belongs to the calling command; `begun` is called with the id of the run; `only` has the ids of the
    remaining jobs, None for all.

    Raises UsageError or NothingSelectedError before any change, InfraError if no job could begin.
    """
    from farm.store.store import open_store

    budget = Budget(request.budget_s)
    config, jobs = choose(config, request, only)
    with handling(interrupts) as handler, open_store(config.store_url) as store:
        kind = partial(device_kind_of, config, request, store)
        jobs = narrow(config, request, jobs, store, kind)
        return _Run(config, request, listener, store, budget, handler).execute(jobs, begun=begun)


def resume(
    config: Config,
    ref: str,
    listener: ProgressListener,
    budget_s: float | None = None,
    *,
    interrupts: InterruptHandler | None = None,
) -> RunOutcome:
    """Run the missing jobs of a run, `latest` or an id: jobs without a verdict on the code, skipped ones as well.

    The budget of the run begins anew, unless `budget_s` replaces it.

    Raises UnknownNameError for a missing run, UsageError for a run in progress, or one whose fingerprint has changed
    since.
    """
    from farm.store.store import open_store

    take_secrets(config)
    with handling(interrupts) as handler, open_store(config.store_url) as store:
        run_id = store.runs.resolve(ref, unbegun=True)
        replay_results(run_id, config.run_folder(run_id), store)
        config, request, view, missing = left_of(config, store, ref)
        budget = Budget(request.budget_s if budget_s is None else budget_s)
        if missing:
            return _Run(config, request, listener, store, budget, handler).execute(missing, view.id)
        if view.exit_code is None:
            with in_progress(config.run_folder(view.id)) as before:
                _release_leases(store, before)
                store.finish_run(view.id, exit_code_of(view))
            view = store.runs.view(view.id)
        return finished_outcome(config, store, request, view)


def _release_leases(store: Store, pid: int) -> None:
    """Release the leases of a dead process at once; leases of other processes expire by time."""
    # A living process has reused the PID.
    if pid and not Path(f"/proc/{pid}").exists():
        host, user = socket.gethostname(), store.user
        store.leases.release(
            lease for lease in store.leases.all() if (lease.host, lease.user, lease.pid) == (host, user, pid)
        )


@dataclass
class _Run(RunSteps):
    """The part of a run on this machine that leaves traces: store, run folder, processes."""

    _interrupts: InterruptHandler
    _supervisor: Supervisor = field(init=False)
    _forks: ForkServer = field(init=False)
    _given_up: frozenset[str] = frozenset()
    """SoCs of which no device came in time."""

    def execute(
        self, jobs: tuple[Job, ...], run_id: str = "", begun: Callable[[str], None] = lambda _: None
    ) -> RunOutcome:
        """Run `jobs` in a new run, whose id `begun` gets, or with `run_id` in an unfinished one."""
        from farm.builds.toolchains.selection import prepare
        from farm.devices.virtual.boot import virtual_storage
        from farm.dispatch.device_forks import device_forks

        with ExitStack() as processes:
            self._supervisor = processes.enter_context(Supervisor())
            # The fork server imports its modules meanwhile.
            self._forks = device_forks(self._supervisor)
            resumed = self._store.runs.view(run_id) if run_id else None
            then = resumed.fingerprint if resumed is not None else {}
            with ThreadPoolExecutor(1) as aside:
                known = then.get("device_kind", "hardware")
                kind_now = aside.submit(device_kind_of, self._config, self._request, self._store, known)
                tools = prepare(self._config, virtual=self._request.virtual > 0)
                kind = kind_now.result()
            fingerprint = self._fingerprint(tools, kind)
            if resumed is not None:
                require_same_conditions(resumed, fingerprint)
            else:
                run_id = self._begin(jobs, tools, fingerprint)
                begun(run_id)
            exit_code: int = ExitCode.INFRA
            with in_progress(self._config.run_folder(run_id)) as before:
                try:
                    _release_leases(self._store, before)
                    # The processes end before their files are removed.
                    with virtual_storage(self._config.cache_dir, run_id) as storage, processes.pop_all():
                        devices = resumed.devices if resumed is not None else ()
                        self._on_devices(jobs, run_id, storage, tools, kind, devices)
                    was_interrupted = self._interrupts.was_interrupted
                    exit_code = INTERRUPTED if was_interrupted else exit_code_of(self._store.runs.view(run_id))
                except KeyboardInterrupt:
                    exit_code = INTERRUPTED
                except FarmError as error:
                    exit_code = error.exit_code
                    raise
                finally:
                    self._store.finish_run(run_id, exit_code)
        log_numbers(self._store, run_id, record=True, confirm=self._request.confirm)
        return self._outcome(run_id, exit_code)

    def _on_devices(
        self,
        jobs: Sequence[Job],
        run_id: str,
        storage: Path,
        tools: Toolchain,
        kind: str,
        before: Sequence[DeviceView],
    ) -> None:
        """Run `jobs` on devices of `kind`; `before` has the devices of a resumed run."""
        from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms

        wait = Wait(self._request.wait_s)
        with ThreadPoolExecutor(1) as aside:
            native = native_of(self._config.cache_dir, tools.runner)
            find_fleet = partial(self._fleet, jobs, storage, native)
            allocation = aside.submit(find_fleet)
            # Also of a run that was killed before it had done so.
            self._store.plan_jobs(run_id, jobs)
            self._read_history(jobs, tools, kind)
            planned = self._order(jobs, self._rebuild.find(jobs, tools))
            health_checks = self._order_health_checks(jobs, tools)
            fleet = wait.fleet(allocation.result, find_fleet)
        versions = {serial: [runtime.versions] for serial, runtime in fleet.runtimes.items()}
        require_same_runtimes(before, lambda one: versions.get(one.serial, ()), run_id)
        terms = LeaseTerms(
            times=self._config.leases,
            priority=Priority.NIGHTLY if self._request.purpose == "nightly" else Priority.PERSON,
            purpose=self._request.command,
            most=self._request.most_devices,
        )
        announcer = None
        if fleet.leased and self._config.notify.is_set:
            from farm.dispatch.notify.quarantine import Announcer

            announcer = Announcer(self._config, self._store)
        pool = DevicePool(
            fleet.devices,
            self._store,
            terms if fleet.leased else None,
            revive=fleet.revive,
            take=lambda one: self._store.record_device(run_id, one, fleet.runtimes[one.serial].versions),
            announcer=announcer,
        )
        with closing(pool):
            self._given_up = wait.acquire(pool, {job.target.soc for job in jobs}, self._budget.end_s)
            planned = [one for one in planned if one.job.target.soc not in self._given_up]
            per_soc = Counter(device.soc for device in pool.held())
            planned = self._fit(run_id, planned, per_soc)
            if not planned:
                return
            run_plan = self._plan(run_id, planned, fleet, health_checks)
            run_plan.prepare_folder()
            with builders(
                self._config, run_plan, tools, self._supervisor, self._listener, self._store, self._rebuild
            ) as to_build:
                self._listener.begin(jobs=len(planned), to_build=to_build, devices=[d.called for d in pool.held()])
                most = self._request.most_failures or 0
                local = LocalRun(run_plan, pool, self._store, self._listener, forks=self._forks, most_failures=most)
                stop = local.finish_running
                lines = (
                    "finishing the running jobs; Ctrl-C again stops at once",
                    f"'farm run --resume {run_id}' goes on then",
                )
                with self._interrupts.finishing(stop, *lines), self._budget.watched(stop):
                    abandoned = local.run()
                self._leave(run_id, abandoned)

    def _fleet(self, jobs: Sequence[Job], storage: Path, native: NativeBuild, partly: bool = False) -> Fleet:
        """Boot virtual devices, or find attached ones. Raises NoDeviceError."""

        config, request, supervisor = self._config, self._request, self._supervisor
        socs = [find_soc(name) for name in dict.fromkeys(job.target.soc for job in jobs)]
        # The options of one request have one mode.
        backend, mode = request.backend, jobs[0].target.mode
        if request.virtual:
            return virtual_fleet(config, socs, request.virtual, backend, supervisor, storage, mode=mode, native=native)
        return attached_fleet(config, socs, backend, request.choice, supervisor, self._store, mode=mode, partly=partly)

    def _fit(self, run_id: str, planned: list[PlannedJob], devices: Mapping[str, int]) -> list[PlannedJob]:
        """Return the jobs that there is time for, and note the others; `devices` are counted by SoC."""
        if self._budget.seconds is None:
            return planned
        planned, skipped = self._budget.cut(
            planned, self._past, devices=devices, builders=self._config.builders, first=self._first
        )
        # Jobs skipped at the earlier end of the run are planned again now.
        self._store.mark_skipped(run_id, {**dict.fromkeys(one.job.id for one in planned), **skipped})
        return planned

    def _plan(
        self, run_id: str, jobs: Sequence[PlannedJob], fleet: Fleet, health_checks: Sequence[PlannedJob]
    ) -> RunPlan:
        """Return the plan that workers read."""

        config, request = self._config, self._request
        return RunPlan(
            run_id=run_id,
            folder=config.run_folder(run_id),
            cache_root=config.cache_dir,
            jobs=tuple(jobs),
            devices=tuple(fleet.devices),
            runtimes=fleet.runtimes,
            artifact_root=config.state_dir / "artifacts",
            optrace=optrace_tools(config, request),
            health_checks=tuple(health_checks),
            leased=fleet.leased,
            health=config.health,
            failures=config.failures,
            **request.execution,
        )

    def _leave(self, run_id: str, abandoned: Collection[str]) -> None:
        """Mark the jobs that the budget kept from starting as skipped; other missing jobs are not."""
        if not self._budget.is_over or self._interrupts.was_interrupted:
            return
        jobs = self._store.runs.view(run_id).jobs
        due = [job for job in jobs if job.soc not in self._given_up]
        left = [job.id for job in due if not job.attempts and job.skipped is None and job.id not in abandoned]
        self._store.mark_skipped(run_id, self._budget.unbegun(left, self._past))
