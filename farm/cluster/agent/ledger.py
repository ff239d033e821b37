"""The leases of an agent, and the order in which the database and its devices learn of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from farm.store.leases.rules import Lease


class Ledger:
    """What an agent holds, by device.

    Claims, releases and heartbeats happen one after the other, inside of `changing`, with what the devices are told of
    them: else a heartbeat that is answered late would call a lease lost that was claimed meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let nobody else ask the database about leases during the block."""
        with self._lock:
            yield

    def held(self) -> list[Lease]:
        """Return the leases, for who is in `changing`."""
        return list(self._leases.values())

    def add(self, lease: Lease) -> None:
        """Note a lease that was given, in the place of an earlier one of the device."""
        self._leases[lease.device] = lease

    def drop(self, devices: Iterable[str]) -> None:
        """Note that the leases of these devices are over."""
        for device in devices:
            self._leases.pop(device, None)
