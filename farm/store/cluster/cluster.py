"""Rows of a shared farm: `store.cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import UsageError
from farm.store.cluster.agents import AbandonedWork, Agents
from farm.store.cluster.builds import BuildWork
from farm.store.cluster.orders import Orders, Views
from farm.store.cluster.shards import Claims, ShardResults

if TYPE_CHECKING:
    from farm.store.clock import Clock
    from farm.store.database import Database


class Cluster(Orders, Claims, ShardResults, BuildWork, Agents, AbandonedWork, Views):
    """Store access of the clients and agents of a shared farm. Raises UsageError for a store other than PostgreSQL.

    Times are on the database's clock; every method is one transaction and raises StoreError if the database refuses.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        if database.is_sqlite:
            raise UsageError(f"{database.name}: several hosts share a store on PostgreSQL (docs/guides/three_hosts.md)")
        super().__init__(database, clock)
