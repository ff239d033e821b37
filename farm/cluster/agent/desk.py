"""What an agent does for its devices: `Office`, by the parts that claim, fetch, record and run slots."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from farm.cluster.agent.office import Prepared
from farm.cluster.slots.slot_process import SlotProcess
from farm.devices.health import Health
from farm.errors import FarmError, InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farm.cluster.agent.claimer import Claimer
    from farm.cluster.agent.recorder import Recorder
    from farm.cluster.files.prepare import Preparer
    from farm.cluster.slots.slot_protocol import DeviceSlot
    from farm.devices.device import Device
    from farm.store.cluster.records import HeldShard, ShardJob, ShardResult
    from farm.store.leases.registry import HealthEvent
    from farm.store.leases.rules import Lease
    from farm.store.store import Store
    from farm.system.processes import Supervisor

_FETCHING = 4
"""Shards that are prepared at once."""


class DeskParts(NamedTuple):
    """What the devices are served with."""

    store: Store
    supervisor: Supervisor
    recorder: Recorder
    claimer: Claimer
    preparer: Preparer
    logs: Path
    """Folder for what slots print."""


class Desk:
    """Serves devices; belongs to the thread of decisions, but for `post`, `note` and `events`."""

    def __init__(
        self,
        soc_of: Callable[[str], str],
        changed: Callable[[], None],
        note: Callable[[str], None],
        slots: Callable[[Device], DeviceSlot] | None,
    ) -> None:
        """`soc_of` returns the SoC of a device by its id; `changed` is called when facts of a device are others.

        `slots` makes slots in the place of processes.
        """
        self._soc_of, self._changed, self._note_line, self._make_slot = soc_of, changed, note, slots
        self.events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What is to be done in the thread of decisions."""
        self._fetchers = ThreadPoolExecutor(_FETCHING, "prepare")
        self._recorded: set[tuple[str, str]] = set()
        """Devices of runs, by the run, that the store knows of."""
        self._timers: set[threading.Timer] = set()
        self.has_quarantined = False
        """A device was quarantined, of which somebody may have to hear."""

    def open(self, parts: DeskParts) -> None:
        """Serve with these parts."""
        self._parts = parts

    def want(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device."""
        self._parts.claimer.want(device, self._soc_of(device), keep)

    def unwant(self, device: str) -> None:
        """Claim nothing for a device."""
        self._parts.claimer.unwant(device)

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch what a shard needs, and call `done`."""

        def prepare() -> None:
            try:
                answer: Prepared | FarmError = self._prepared(held, device)
            except FarmError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a shard that nobody can prepare must not stay with this host
                answer = InfraError(f"{type(error).__name__}: {error}")
            self.post(partial(done, answer))

        self._fetchers.submit(prepare)

    def _prepared(self, held: HeldShard, device: Device) -> Prepared:
        ready = self._parts.preparer.prepare(held, device)
        key = held.run_id, device.id
        if key not in self._recorded:
            runtime = ready.plan.runtimes[device.serial]
            self._parts.store.record_device(held.run_id, device, runtime.versions)
            self._recorded.add(key)
        return Prepared(ready.plan, ready.planned)

    def forget_run(self, run_id: str) -> None:
        """Let go of the files of a run that is over."""
        self._recorded = {one for one in self._recorded if one[0] != run_id}
        self._fetchers.submit(self._parts.preparer.forget, run_id)

    def result(self, result: ShardResult) -> None:
        """Record a result."""
        self._parts.recorder.result(result)

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Give back a shard with the jobs that are left."""
        self._parts.recorder.put_back(held, jobs, why)

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, and call `done`."""
        self._parts.recorder.release(lease, partial(self.post, done))

    def health(self, event: HealthEvent) -> None:
        """Record what happened to a device."""
        self._parts.recorder.health(event)
        self.has_quarantined = self.has_quarantined or event.state == Health.QUARANTINED

    def slot(self, device: Device) -> DeviceSlot:
        """Return a new slot."""
        if self._make_slot is not None:
            return self._make_slot(device)
        log = self._parts.logs / f"{device.id.replace('/', '_')}.log"
        return SlotProcess(self._parts.supervisor, f"slot-{device.serial}", log)

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions."""
        self.events.put(action)

    def aside(self, action: Callable[[], None]) -> None:
        """Have `action`, which takes a while, called in another thread."""
        self._fetchers.submit(action)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions, in a while."""

        def ring() -> None:
            self._timers.discard(timer)
            self.post(action)

        timer = threading.Timer(seconds, ring)
        timer.daemon = True
        self._timers.add(timer)
        timer.start()

    def changed(self) -> None:
        """Tell others that a device rests, or does not any more."""
        self._changed()

    def note(self, line: str) -> None:
        """Write a line for people."""
        self._note_line(line)

    def close(self) -> None:
        """Let nothing happen later."""
        for timer in list(self._timers):
            timer.cancel()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
