"""Jobs of Procrastinate that agents take: sent, put back and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import text

from farm.store.messages.install import require_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from farm.store.database import Database

_T = TypeVar("_T")


class Messages:
    """The messages of a store on PostgreSQL. Every method is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_there = False

    def require(self) -> None:
        """See to it that there are tables for messages, of a version that fits.

        Raises StoreError where this user may not make them, or they are of a newer farm; MissingToolError without
        Procrastinate.
        """
        self._database.write(require_messages)
        self._is_there = True

    def finish(self, run_id: str) -> None:
        """Send the message that a run is over, whose exit code, alerts and end some agent records."""
        self._send(lambda connection: connection.execute(text("SELECT farm_finish(:run)"), {"run": run_id}))

    def retry(self, silent_s: float) -> int:
        """Put back what workers hold that were not heard of for so long; return how many messages those were."""
        query = text("SELECT farm_retry_messages(:silent_s)")
        return self._send(lambda connection: int(connection.scalar(query, {"silent_s": silent_s}) or 0))

    def tidy(self, hours: float) -> int:
        """Remove messages that ended so long ago; return how many those were."""
        query = text("SELECT farm_tidy_messages(:hours)")
        return self._send(lambda connection: int(connection.scalar(query, {"hours": hours}) or 0))

    def _send(self, action: Callable[[Connection], _T]) -> _T:
        if not self._is_there:
            found = text("SELECT to_regprocedure('farm_finish(text)') IS NOT NULL")
            with self._database.reading() as connection:
                self._is_there = bool(connection.scalar(found))
            if not self._is_there:
                self.require()
        return self._database.write(action)
