"""Hints of news by NOTIFY: receivers also look at intervals, so that a lost hint costs only time."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from farm.base.processes import ready_of
from farm.store.cluster.part import CHANNEL

if TYPE_CHECKING:
    from farm.store.store import Store

_RETRY_SECONDS = 2.0


class Hints:
    """Listening connection to the database, to be closed. Belongs to one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection: Any = None
        self._tried_s = float("-inf")

    def wait(self, timeout_s: float, also: int | None = None) -> set[str]:
        """Return payloads as soon as one arrives; empty after `timeout_s`.

        Empty as well once the descriptor `also` is readable. Waits in the same way while the database is away.
        """
        import psycopg

        self._connect()
        descriptor = None if self._connection is None else self._connection.fileno()
        if descriptor not in ready_of([fd for fd in (descriptor, also) if fd is not None], timeout_s):
            return set()
        try:
            return {notification.payload for notification in self._connection.notifies(timeout=0)}
        except psycopg.Error:
            # The connection is lost: the next `wait` opens another.
            self.close()
            return set()

    def close(self) -> None:
        """Close the connection; `wait` opens another."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _connect(self) -> None:
        import psycopg

        if self._connection is not None or time.monotonic() - self._tried_s < _RETRY_SECONDS:
            return
        self._tried_s = time.monotonic()
        try:
            self._connection = psycopg.connect(**self._store.connection_arguments(), autocommit=True)
            self._connection.execute(f"LISTEN {CHANNEL}")
        except psycopg.Error:
            self.close()
