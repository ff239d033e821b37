"""Common base of the groups of a shared farm's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection, text

from farm.base.errors import UnreadableRowError
from farm.store.cluster.unreadable import set_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farm.store.clock import Clock
    from farm.store.database import Database

_T = TypeVar("_T")
_MOST_UNREADABLE = 100
"""Most rows that a call sets aside."""
CHANNEL = "farm"
"""PostgreSQL channel of hints to agents and clients to look at the tables; a hint itself proves nothing."""

_NOTIFY = text("SELECT pg_notify(:channel, hint) FROM unnest(CAST(:hints AS text[])) AS hint")


class ClusterPart:
    """Group of rows; every public method of a subclass is one transaction and raises StoreError."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def set_aside(self, error: UnreadableRowError) -> None:
        """Refuse the runs that an unreadable row belongs to."""
        self._database.write(lambda connection: set_aside(connection, error))

    def _write(self, action: Callable[[Connection], _T]) -> _T:
        """Call `action` in one transaction; after an unreadable row, set the row aside and repeat."""
        for _ in range(_MOST_UNREADABLE):
            try:
                return self._database.write(action)
            except UnreadableRowError as error:
                self.set_aside(error)
        return self._database.write(action)


def notify(connection: Connection, hints: Iterable[str]) -> None:
    """Send hints to all listeners when the transaction commits: `work SM8650`, `cancel RUN`."""
    if listed := sorted(set(hints)):
        connection.execute(_NOTIFY, {"channel": CHANNEL, "hints": listed})
