"""The decision thread for all devices of a machine, and its interfaces to job sources and to the display of a run."""

from __future__ import annotations

import contextlib
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.base.errors import FarmError
    from farm.builds.compile.protocol import BuildReply
    from farm.devices.device import Device, HealthEvent
    from farm.dispatch.messages import ForkedProcess
    from farm.dispatch.request.request import RunPlan
    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult


# The decision thread for all devices of a machine: calls happen one after the other, in the order of their arrival.


_TICK_SECONDS = 0.25


class Dispatcher:
    """Queue of actions for the thread of `run`. Any thread may call the other methods."""

    def __init__(self, make_process: Callable[[Device], ForkedProcess]) -> None:
        self.process = make_process
        """Returns a new device process, which is not started."""
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, is_over: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Call posted actions, and `tick` four times a second, until `is_over`."""
        ticked_s = time.monotonic()
        while not is_over():
            with contextlib.suppress(Empty):
                self._actions.get(timeout=max(0.0, ticked_s + _TICK_SECONDS - time.monotonic()))()
            if time.monotonic() >= ticked_s + _TICK_SECONDS:
                ticked_s = time.monotonic()
                tick()

    def post(self, action: Callable[[], None]) -> None:
        """Call `action` in the decision thread."""
        self._actions.put(action)


# Interface of a device runner to its jobs: `JobSource` gives jobs and takes results.


class Prepared(NamedTuple):
    """Shard (some jobs of a run) whose bundles and runtime are on this machine."""

    plan: RunPlan
    planned: Sequence[PlannedJob]
    """Jobs of the shard."""
    number: int = 0
    """Number of the device in the plan."""


class JobSource(Protocol):
    """Source of work: gives shards to devices and takes their results. No call waits."""

    def request(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device, by its id; `keep` is the device's lease if it still runs another shard."""

    def cancel_request(self, device: str) -> None:
        """Withdraw the request of a device."""

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Bring the files of a shard to this machine, then call `done` in the decision thread."""

    def others(self, held: HeldShard) -> tuple[str, ...]:
        """Return the devices that could try a failed job of a shard now."""

    def result(self, result: ShardResult) -> None:
        """Record a result."""

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Give back the remaining jobs of a shard, after its results are recorded."""

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done` in the decision thread."""

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        """Note that a device takes no jobs for a while because of `why`, or takes jobs again if `why` is empty.

        `halts` is True for a lasting fault of this machine, such as a full disk, which is no fault of the device.
        """


# Events of a run for its display.


class ProgressListener(Protocol):
    """Display of a run in progress. Several threads call its methods."""

    def begin(self, *, jobs: int, to_build: int, devices: list[str]) -> None:
        """Show the start of a planned run: its jobs, the number to compile, its devices."""

    def build_started(self, job_id: str) -> None:
        """Show that a compiler process has begun a job."""

    def build_ended(self, job_id: str, reply: BuildReply) -> None:
        """Show that a compiler process has finished a job."""

    def devices(self, running: dict[str, str]) -> None:
        """Show the jobs that run now, by device."""

    def job_ended(self, shown: dict[str, Any]) -> None:
        """Show the last attempt of a job: a dictionary by `farm.dispatch.local_jobs.shown`."""

    def job_repeated(self, shown: dict[str, Any]) -> None:
        """Show an attempt after which the job is tried again."""
