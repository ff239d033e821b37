"""What the devices of an agent ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.cluster.slots.slot_protocol import DeviceSlot
    from farm.devices.device import Device
    from farm.errors import FarmError
    from farm.request.plan import PlannedJob, RunPlan
    from farm.store.cluster.records import HeldShard, ShardJob, ShardResult
    from farm.store.leases.registry import HealthEvent
    from farm.store.leases.rules import Lease


class Prepared(NamedTuple):
    """A shard whose bundles and runtime are on this machine."""

    plan: RunPlan
    """Of its run on this device."""
    planned: Sequence[PlannedJob]


class Office(Protocol):
    """What an agent does for its devices. No call waits."""

    def want(self, device: str, keep: Lease | None) -> None:
        """Claim a shard for a device; `keep` is the lease under which it finishes another one."""

    def unwant(self, device: str) -> None:
        """Claim nothing for a device."""

    def prepare(self, held: HeldShard, device: Device, done: Callable[[Prepared | FarmError], None]) -> None:
        """Fetch what a shard needs, and call `done`."""

    def result(self, result: ShardResult) -> None:
        """Record a result."""

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Give back a shard with the jobs that are left, after its results are recorded."""

    def release(self, lease: Lease, done: Callable[[], None]) -> None:
        """End a lease after all results are recorded, and call `done`."""

    def health(self, event: HealthEvent) -> None:
        """Record what happened to a device."""

    def slot(self, device: Device) -> DeviceSlot:
        """Return a new slot."""

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called in the thread of decisions, in a while."""

    def changed(self) -> None:
        """Tell others that a device rests, or does not any more."""

    def note(self, line: str) -> None:
        """Write a line for people."""
