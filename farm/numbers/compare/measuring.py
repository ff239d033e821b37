"""Execution of differing programs on all available devices: a bench and a thread for each."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, InfraError, NoDeviceError
from farm.base.structs import prepare_decoders
from farm.base.text import reason_line
from farm.numbers.compare.pairing import JobOutcome, run_job
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.results.analysis.confirmation import pairs_needed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.base.config.settings import Config
    from farm.builds.runtime.native.targets import Mode
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.device import Device
    from farm.numbers.compare.request import ComparisonRequest
    from farm.store.store import Store
    from farm.suites.suite import Target

logger = logging.getLogger(__name__)

# Longest wait for a further device while one is held.
_TAKEN_S = 5.0
_MOST_DEVICES = 4
# Further tries of a failed device; its job is repeated with the new session.
_TRIES = 2
_LOOK_EVERY_S = 0.2


class JobToRun(msgspec.Struct, frozen=True, kw_only=True):
    """Job with at least one side to execute."""

    name: str
    target: Target
    """Target of either side: SoC and backend are equal."""
    a: Side | None
    """None if this side was not compiled."""
    b: Side | None


class MeasuringPool:
    """Devices that measure jobs, with a thread for each device."""

    def __init__(
        self, configs: tuple[Config, Config], store: Store, request: ComparisonRequest, stop: threading.Event
    ) -> None:
        """Take the `configs` of A and B; no job begins after `stop` is set."""
        self._configs, self._store, self._request = configs, store, request
        self._stop = stop
        self._lock = threading.Lock()
        self._retried: set[str] = set()
        self._most_pairs = 0
        self.devices: dict[str, Device] = {}
        """Serials by the name of the thread that uses it."""
        self.outcomes: dict[str, JobOutcome] = {}
        """Outcomes by job name."""
        self.left_out: dict[str, str] = {}
        """Reasons of jobs that were not executed, by job name."""

    def run(self, jobs: Sequence[JobToRun], look: Callable[[], None] = lambda: None) -> None:
        """Run all of `jobs`; `look` is called every 0.2 s, in this thread."""
        # Each job claims its cycles, and on hardware its latency as well.
        claims = len(jobs) * (1 if self._request.virtual else 2)
        self._most_pairs = max(self._request.pairs, pairs_needed(claims))
        queues: dict[str, deque[JobToRun]] = {}
        for job in jobs:
            queues.setdefault(job.target.soc, deque()).append(job)
        width = self._request.virtual or min(self._request.most_devices or _MOST_DEVICES, _MOST_DEVICES)
        threads = [
            threading.Thread(target=self._serve, args=(queue, number), name=f"bench-{soc}-{number}", daemon=True)
            for soc, queue in queues.items()
            for number in range(min(width, len(queue)))
        ]
        # Each thread reads leases from the store.
        prepare_decoders()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(_LOOK_EVERY_S)
            look()
        for queue in queues.values():
            for job in queue:
                self.left_out.setdefault(job.name, "interrupted" if self._stop.is_set() else "no device was left")

    def _serve(self, queue: deque[JobToRun], number: int) -> None:
        """Run the jobs of a queue on one device until the queue is empty; a failed device is opened again."""
        for tries_left in reversed(range(_TRIES + 1)):
            try:
                target = queue[0].target
            except IndexError:
                return
            try:
                with self._bench(target, number) as bench:
                    self._serve_on(bench, queue)
            except NoDeviceError as error:
                if not number:
                    self._give_up(queue, str(error))
                return
            except InfraError as error:
                if not tries_left or self._stop.is_set():
                    self._give_up(queue, str(error))
                    return
                logger.warning("once more: %s", reason_line(str(error)))
            except (FarmError, OSError) as error:
                self._give_up(queue, str(error))
                return
            else:
                return

    def _bench(self, target: Target, number: int) -> InterleavedBench:
        return InterleavedBench(
            self._configs[1],
            self._store,
            target,
            virtual=self._request.virtual > 0,
            choice=self._request.choice,
            purpose=self._request.command,
            until_s=time.monotonic() + _TAKEN_S if number else math.inf,
        )

    def _serve_on(self, bench: InterleavedBench, queue: deque[JobToRun]) -> None:
        """Run the jobs of a queue on `bench`. Raises InfraError; the failed job is put back once."""
        with self._lock:
            self.devices[threading.current_thread().name] = bench.device
        # Runtimes of side A by mode.
        runtimes: dict[Mode, Runtime | None] = {}
        while not self._stop.is_set():
            try:
                job = queue.popleft()
            except IndexError:
                return
            a = job.a
            if a is not None:
                mode = a.job.target.mode
                if mode not in runtimes:
                    runtimes[mode] = other_runtime(
                        self._configs[0], bench.device, self._request.backend, bench.runtime, mode
                    )
                a = msgspec.structs.replace(a, runtime=runtimes[mode])
            try:
                outcome = run_job(bench, a, job.b, self._most_pairs, self._stop)
            except InfraError as error:
                if job.name not in self._retried:
                    self._retried.add(job.name)
                    queue.appendleft(job)
                else:
                    self._keep(job, JobOutcome(device=bench.device.serial, problem=reason_line(str(error))))
                raise
            self._keep(job, outcome)

    def _keep(self, job: JobToRun, outcome: JobOutcome) -> None:
        with self._lock:
            self.outcomes[job.name] = outcome

    def _give_up(self, queue: deque[JobToRun], reason: str) -> None:
        logger.warning(reason_line(reason))
        for job in list(queue):
            # Another device may still run these jobs.
            self.left_out.setdefault(job.name, reason_line(reason))


def other_runtime(
    config: Config, device: Device, backend: str, runtime: Runtime, mode: Mode = "traditional"
) -> Runtime | None:
    """Return the runtime of the toolchain in `config` for a device; None if it equals `runtime`."""
    from farm.builds.runtime.runtime import runtime_for

    found = runtime_for(config, device.soc, device.kind, device.os, backend, mode)
    return None if found.digest == runtime.digest else found
