"""Leases and shards of an agent, and one order of their changes for the database and for the devices.

`SharedRecords` writes the agent's results under these leases.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farm.base.errors import FarmError, LeaseLostError
from farm.policy.situation import Lease
from farm.store.cluster.records import Claimed, HeartbeatReply, HeldShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.devices.health import HealthEvent
    from farm.store.cluster.records import AgentId, PlannedJob, ShardResult
    from farm.store.store import Store


class SharedRecords:
    """A `RecordSink` in the name of an agent."""

    def __init__(self, store: Store, ledger: Ledger, ttl_s: float) -> None:
        self._store, self._ledger, self._ttl_s = store, ledger, ttl_s
        self._agent: AgentId

    def begin(self, agent: AgentId) -> None:
        """Record in the name of `agent`."""
        self._agent = agent

    def record(self, results: Sequence[ShardResult]) -> Mapping[int, FarmError]:
        """Record results under their fences; return the reason for each refused result, by its index."""
        refused = self._store.cluster.record(self._agent, results, ttl_s=self._ttl_s)
        return {index: LeaseLostError(why) for index, why in refused.items()}

    def put_back(self, held: HeldShard, jobs: Sequence[PlannedJob], why: str) -> None:
        """Put back a shard with its remaining jobs. Raises LeaseLostError."""
        self._store.cluster.put_back(self._agent, held.id, held.lease.fence, why=why, jobs=jobs)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases."""
        with self._ledger.changing:
            self._store.cluster.release(self._agent, leases)
            self._ledger.drop(leases)

    def record_health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._store.devices.record_health(event)


class Ledger:
    """Leases of an agent by device, and the shards of its answered claims.

    Claims, releases and heartbeats, each with its messages to the devices, happen one after the other under the lock
    `changing`: otherwise a late answer to a heartbeat would report a lease as lost that was claimed meanwhile, or take
    back a shard whose claim is being answered.
    """

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.leases: dict[str, Lease] = {}
        self.claimed: Claimed = frozenset()

    def add(self, held: HeldShard) -> None:
        """Add a claimed shard and its lease, which replaces an earlier lease of the device."""
        self.leases[held.lease.device] = held.lease
        self.claimed |= {(held.id, held.lease.fence)}

    def drop(self, leases: Sequence[Lease]) -> None:
        """Remove leases that have ended."""
        for lease in leases:
            self.leases.pop(lease.device, None)

    def apply(self, reply: HeartbeatReply) -> None:
        """Remove the leases that a heartbeat found lost; take over the shards that the store has for this agent."""
        for device in reply.lost:
            self.leases.pop(device, None)
        self.claimed = reply.claimed
