"""Reads of the everyday commands from the store of this machine; `client.py` has those from the API of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from farm.serve.page import Facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.dispatch.pool.inventory import DeviceRow
    from farm.policy.situation import Waiting
    from farm.store.artifacts import ArtifactStore
    from farm.store.store import Store

Query = TypeVar("Query", bound=msgspec.Struct)
Found = TypeVar("Found", bound=Facts)


class StoreReader:
    """Reader of the store, and of the devices that are attached to this machine."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store

    @property
    def artifacts(self) -> ArtifactStore:
        """Files of attempts."""
        from farm.store.artifacts import open_artifacts

        return open_artifacts(self._config)

    def read(self, make: Callable[[Store, Query], Found], query: Query) -> Found:
        """Return the facts of a page."""
        return make(self._store, query)

    def devices(self) -> tuple[list[DeviceRow], list[Waiting]]:
        """Ask every attached device for its state; return attached and absent known devices."""
        from farm.base.processes import Supervisor
        from farm.dispatch.pool.inventory import take_inventory

        with Supervisor() as supervisor:
            return take_inventory(self._config, self._store, supervisor), self._store.leases.waiting()
