"""Interface of a device runner to its jobs: `JobSource` gives jobs and takes results."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.base.errors import FarmError
    from farm.devices.device import Device
    from farm.devices.health import HealthEvent
    from farm.dispatch.request.plan import RunPlan
    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, PlannedJob, ShardResult


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
