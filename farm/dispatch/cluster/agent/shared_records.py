"""Records of an agent in the store of a shared farm, as its recorder writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import FarmError, LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.devices.health import HealthEvent
    from farm.dispatch.cluster.agent.ledger import Ledger
    from farm.policy.situation import Lease
    from farm.store.cluster.records import AgentId, HeldShard, ShardJob, ShardResult
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

    def put_back(self, held: HeldShard, jobs: Sequence[ShardJob], why: str) -> None:
        """Put back a shard with its remaining jobs. Raises LeaseLostError."""
        self._store.cluster.put_back(self._agent, held.id, held.lease.fence, why=why, jobs=jobs)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases."""
        with self._ledger.changing():
            self._store.cluster.release(self._agent, leases)
            self._ledger.drop(leases)

    def record_health(self, event: HealthEvent) -> None:
        """Record a health event of a device."""
        self._store.devices.record_health(event)
