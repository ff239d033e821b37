"""The job source of an agent: shards from PostgreSQL, by the parts that claim, fetch and record."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from farm.base.errors import FarmError, InfraError, UnreadableRowError
from farm.devices.health import Health, HealthEvent
from farm.dispatch.job_source import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.devices.device import Device
    from farm.dispatch.cluster.agent.claimer import Claimer
    from farm.dispatch.cluster.files.prepare import Preparer
    from farm.dispatch.dispatcher import Dispatcher
    from farm.dispatch.recorder import Recorder
    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_FETCHING = 4
"""Shards that are prepared at once."""


class SharedJobs:
    """A `JobSource`. Belongs to the decision thread."""

    def __init__(
        self,
        host: Dispatcher,
        store: Store,
        recorder: Recorder,
        claimer: Claimer,
        preparer: Preparer,
        *,
        device_of: Callable[[str], Device],
        changed: Callable[[], None],
    ) -> None:
        """`device_of` returns a device by its id; `changed` is called when a device rests."""
        self._host, self._store, self._recorder, self._claimer, self._preparer = (
            host, store, recorder, claimer, preparer
        )  # fmt: skip
        self._device_of, self._changed = device_of, changed
        self._fetchers = ThreadPoolExecutor(_FETCHING, "prepare")
        self._recorded: set[tuple[str, str]] = set()
        """Run and device of each recorded device of a run."""
        self.has_quarantined = False
        """True once a device was quarantined, so that a notice may be due."""

    def request(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device."""
        self._claimer.request(device, self._device_of(device).soc, keep)

    def cancel_request(self, device: str) -> None:
        """Claim nothing for a device."""
        self._claimer.cancel_request(device)

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch the files of a shard, then call `done`."""

        def prepare() -> None:
            try:
                answer: Prepared | FarmError = self._prepared(held, device)
            except UnreadableRowError as error:
                answer = error
                with contextlib.suppress(FarmError):
                    self._store.cluster.set_aside(error)
            except FarmError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a shard that cannot be prepared must not stay with this host
                answer = InfraError(f"{type(error).__name__}: {error}")
            self._host.post(partial(done, answer))

        self._fetchers.submit(prepare)

    def _prepared(self, held: HeldShard, device: Device) -> Prepared:
        ready = self._preparer.prepare(held, device)
        key = held.run_id, device.id
        if key not in self._recorded:
            runtime = ready.plan.runtimes[device.serial]
            self._store.record_device(held.run_id, device, runtime.versions)
            self._recorded.add(key)
        return ready

    def others(self, held: HeldShard) -> tuple[str, ...]:
        """Return the ids of the other living devices at the time of the claim."""
        return held.others

    def forget_run(self, run_id: str) -> None:
        """Remove the files of a run that is over."""
        self._recorded = {one for one in self._recorded if one[0] != run_id}
        self._fetchers.submit(self._preparer.forget, run_id)

    def result(self, result: ShardResult) -> None:
        """Record a result."""
        self._recorder.result(result)

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs."""
        self._recorder.put_back(held, jobs, why)

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, then call `done`."""
        self._recorder.release(lease, partial(self._host.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._recorder.health(event)
        self.has_quarantined = self.has_quarantined or event.state == Health.QUARANTINED

    def resting(self, device: str, why: str, *, halts: bool) -> None:
        """Announce that a device rests, or has jobs again."""
        del halts
        if why:
            name = self._device_of(device).called
            logger.warning("%s is not used for a while: %s", name, why, extra={"device": name})
        self._changed()

    def aside(self, action: Callable[[], None]) -> None:
        """Call `action`, which takes a while, in another thread."""
        self._fetchers.submit(action)

    def close(self) -> None:
        """Begin nothing else."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
