"""The job source of an agent: shards from PostgreSQL, by the parts that claim, fetch and record."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from farm.base.errors import FarmError, InfraError, UnreadableRowError
from farm.devices.health import Health, HealthEvent
from farm.dispatch.job_source import Host, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.devices.device import Device
    from farm.dispatch.cluster.agent.claimer import Claimer
    from farm.dispatch.cluster.files.prepare import Preparer
    from farm.dispatch.recorder import Recorder
    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_FETCHING = 4
"""Shards that are prepared at once."""


class SharedParts(NamedTuple):
    """Parts of an agent that its job source uses."""

    store: Store
    recorder: Recorder
    claimer: Claimer
    preparer: Preparer


class SharedJobs:
    """A `JobSource`. Belongs to the decision thread."""

    def __init__(
        self, host: Host, called: Callable[[str], str], soc_of: Callable[[str], str], changed: Callable[[], None]
    ) -> None:
        """`called` and `soc_of` return name and SoC of a device by its id; `changed` is called when a device rests."""
        self._host, self._called, self._soc_of, self._changed = host, called, soc_of, changed
        self._fetchers = ThreadPoolExecutor(_FETCHING, "prepare")
        self._recorded: set[tuple[str, str]] = set()
        """Run and device of each recorded device of a run."""
        self.has_quarantined = False
        """True once a device was quarantined, so that a notice may be due."""

    def open(self, parts: SharedParts) -> None:
        """Use these parts."""
        self._parts = parts

    def request(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device."""
        self._parts.claimer.request(device, self._soc_of(device), keep)

    def cancel_request(self, device: str) -> None:
        """Claim nothing for a device."""
        self._parts.claimer.cancel_request(device)

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch the files of a shard, then call `done`."""

        def prepare() -> None:
            try:
                answer: Prepared | FarmError = self._prepared(held, device)
            except UnreadableRowError as error:
                answer = error
                with contextlib.suppress(FarmError):
                    self._parts.store.cluster.set_aside(error)
            except FarmError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a shard that cannot be prepared must not stay with this host
                answer = InfraError(f"{type(error).__name__}: {error}")
            self._host.post(partial(done, answer))

        self._fetchers.submit(prepare)

    def _prepared(self, held: HeldShard, device: Device) -> Prepared:
        ready = self._parts.preparer.prepare(held, device)
        key = held.run_id, device.id
        if key not in self._recorded:
            runtime = ready.plan.runtimes[device.serial]
            self._parts.store.record_device(held.run_id, device, runtime.versions)
            self._recorded.add(key)
        return ready

    def others(self, held: HeldShard) -> tuple[str, ...]:
        """Return the ids of the other living devices at the time of the claim."""
        return held.others

    def forget_run(self, run_id: str) -> None:
        """Remove the files of a run that is over."""
        self._recorded = {one for one in self._recorded if one[0] != run_id}
        self._fetchers.submit(self._parts.preparer.forget, run_id)

    def result(self, result: ShardResult) -> None:
        """Record a result."""
        self._parts.recorder.result(result)

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs."""
        self._parts.recorder.put_back(held, jobs, why)

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done`."""
        self._parts.recorder.release(lease, partial(self._host.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._parts.recorder.health(event)
        self.has_quarantined = self.has_quarantined or event.state == Health.QUARANTINED

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        """Announce that a device rests, or has jobs again."""
        del halts
        if why:
            name = self._called(device)
            logger.warning("%s is not used for a while: %s", name, why, extra={"device": name})
        self._changed()

    def aside(self, action: Callable[[], None]) -> None:
        """Call `action`, which takes a while, in another thread."""
        self._fetchers.submit(action)

    def close(self) -> None:
        """Begin nothing else."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
