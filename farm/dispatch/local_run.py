"""Runs the jobs of a plan on the devices of a pool: dispatcher, device processes, result log and recorder together."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import FarmError, LeaseLostError, RowRefusedError
from farm.base.threads import noticing_deaths
from farm.dispatch.device_runner import DeviceRunner
from farm.dispatch.dispatcher import Dispatcher
from farm.dispatch.local_jobs import LocalJobs
from farm.dispatch.process_link import ForkedProcess
from farm.dispatch.recorder import Recorder
from farm.dispatch.result_log import ResultLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from farm.base.fork_server import ForkServer
    from farm.devices.device import Device
    from farm.devices.health import HealthEvent
    from farm.dispatch.pool.device_pool import DevicePool
    from farm.dispatch.progress import ProgressListener
    from farm.dispatch.request.plan import RunPlan
    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, ShardJob, ShardResult
    from farm.store.store import Store

_TICK_SECONDS = 0.25
_LAST_SECONDS = 5.0
"""For the last results, after every device is left."""


class LocalEnd(NamedTuple):
    """End of the jobs of a plan."""

    abandoned: frozenset[str]
    """Ids of jobs for which no device was left."""


class LocalRecords:
    """A `RecordSink`: the store, for a run on this machine."""

    def __init__(self, run_id: str, store: Store, let_go: Callable[[str, int], None] | None = None) -> None:
        """`let_go` ends the lease of a device, by its id and fence."""
        self._run_id, self._store = run_id, store
        self._let_go = let_go or (lambda *_: None)
        self._recorded: set[tuple[int, str, int]] = set()
        """Attempts of the present batch that are recorded, by shard, job and index."""

    def record(self, results: Sequence[ShardResult]) -> Mapping[int, FarmError]:
        """Record the attempts of results under their fences; return the reason for each refused result, by index.

        Raises StoreError; the next call with the same results goes on after the recorded attempts.
        """
        refused: dict[int, FarmError] = {}
        for index, result in enumerate(results):
            try:
                self._record(result)
            except (LeaseLostError, RowRefusedError) as error:
                refused[index] = error
        self._recorded.clear()
        return refused

    def _record(self, result: ShardResult) -> None:
        fence = (result.device, result.fence) if result.fence else None
        for number, attempt in enumerate(result.attempts):
            key = result.shard, result.job_id, number
            if key not in self._recorded:
                artifacts = result.artifacts if number == len(result.attempts) - 1 else ()
                self._store.record_attempt(self._run_id, attempt, artifacts=artifacts, fence=fence)
                self._recorded.add(key)

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Do nothing: the jobs are in memory."""

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases."""
        for lease in leases:
            self._let_go(lease.device, lease.fence)

    def record_health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._store.devices.record_health(event)


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
        numbers = {device.id: number for number, device in enumerate(plan.devices)}
        records = LocalRecords(plan.run_id, store, lambda device, fence: pool.let_go(numbers[device], fence))
        self._recorder = Recorder(
            records, self._log, None, recorded=self._jobs.recorded, failing=self._jobs.store_failing
        )
        self._runners = [
            DeviceRunner(device, self._jobs, self._dispatcher, linger_s=math.inf, rest_s=math.inf)
            for device in plan.devices
        ]

    def finish_running(self) -> None:
        """Begin no other job; running jobs are finished. Safe in a signal handler, and in any thread."""
        self._dispatcher.post(self._jobs.finish_running)

    def run(self) -> LocalEnd:
        """Run every job, and leave every device, also after KeyboardInterrupt."""
        try:
            with noticing_deaths(self._thread_died):
                self._recorder.begin()
                self._jobs.begin(self._runners, self._recorder)
                self._pool.begin(self._jobs.pool_changed)
                self._dispatcher.run(lambda: self._jobs.is_over, self._tick, _TICK_SECONDS)
        finally:
            self._close()
        return LocalEnd(frozenset(self._jobs.abandoned))

    def _thread_died(self, why: str) -> None:
        self._dispatcher.post(lambda: self._jobs.halt(why))

    def _tick(self) -> None:
        for runner in self._runners:
            runner.tick()

    def _close(self) -> None:
        threads = [threading.Thread(target=runner.close, name="close") for runner in self._runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._dispatcher.close()
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
        recorder = Recorder(LocalRecords(run_id, store), log, None)
        recorder.begin()
        recorder.close(_LAST_SECONDS)
    finally:
        log.close()
