"""Leases and shards of an agent, and one order of their changes for the database and for the devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from farm.policy.situation import Lease
from farm.store.cluster.records import Claimed, HeartbeatReply, HeldShard


class Ledger:
    """Leases of an agent by device, and the shards of its answered claims.

    Claims, releases and heartbeats, each with its messages to the devices, happen one after the other inside of
    `changing`: otherwise a late answer to a heartbeat would report a lease as lost that was claimed meanwhile, or take
    back a shard whose claim is being answered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._claimed = Claimed()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Exclude other threads from requests about leases during the block."""
        with self._lock:
            yield

    def held(self) -> list[Lease]:
        """Return the leases. Call it inside `changing`."""
        return list(self._leases.values())

    def claimed(self) -> Claimed:
        """Return the shards. Call it inside `changing`."""
        return self._claimed

    def add(self, held: HeldShard) -> None:
        """Add a claimed shard and its lease, which replaces an earlier lease of the device."""
        self._leases[held.lease.device] = held.lease
        self._claimed = Claimed(self._claimed.shards | {(held.id, held.lease.fence)})

    def drop(self, leases: Sequence[Lease]) -> None:
        """Remove leases that have ended."""
        for lease in leases:
            self._leases.pop(lease.device, None)

    def apply(self, reply: HeartbeatReply) -> None:
        """Remove the leases that a heartbeat found lost; take over the shards that the store has for this agent."""
        for device in reply.lost:
            self._leases.pop(device, None)
        self._claimed = reply.claimed
