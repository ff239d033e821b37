"""Leases and shards of an agent, and the order in which the database and its devices learn of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farm.store.cluster.records import Claimed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.policy.situation import Lease
    from farm.store.cluster.records import HeldShard, Minded


class Ledger:
    """Leases of an agent by device, and the shards of its answered claims.

    Claims, releases and heartbeats happen one after the other, inside of `changing`, with what the devices are told of
    them: else a heartbeat that is answered late would call a lease lost that was claimed meanwhile, or take back a
    shard whose claim is being answered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._claimed = Claimed()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let nobody else ask the database about leases during the block."""
        with self._lock:
            yield

    def held(self) -> list[Lease]:
        """Return the leases, for who is in `changing`."""
        return list(self._leases.values())

    def claimed(self) -> Claimed:
        """Return the shards, for who is in `changing`."""
        return self._claimed

    def add(self, held: HeldShard) -> None:
        """Note a shard that was given with its lease, in the place of an earlier lease of the device."""
        self._leases[held.lease.device] = held.lease
        self._claimed = Claimed(self._claimed.shards | {(held.id, held.lease.fence)})

    def drop(self, leases: Sequence[Lease]) -> None:
        """Note that these leases are over."""
        for lease in leases:
            self._leases.pop(lease.device, None)

    def minded(self, minded: Minded) -> None:
        """Note the leases that a heartbeat found lost, and the shards that the store still has as held."""
        for device in minded.lost:
            self._leases.pop(device, None)
        self._claimed = minded.claimed
