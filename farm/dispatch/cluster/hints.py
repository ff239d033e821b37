"""Hints of news by NOTIFY: receivers also look at intervals, so that a lost hint costs only time."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from farm.base.processes import ready_of

if TYPE_CHECKING:
    from types import TracebackType

    from farm.store.store import Store

CHANNEL = "farm"
"""Channel of NOTIFY; payloads are a word and a name: `work SM8650`, `cancel RUN`, `ended RUN`, `result RUN`."""

_RETRY_SECONDS = 2.0


class Hints:
    """Listening connection to the database. Belongs to one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._connection: Any = None
        self._tried_s = float("-inf")

    def __enter__(self) -> Hints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, timeout_s: float, also: int | None = None) -> set[str]:
        """Return payloads as soon as one arrives; empty after `timeout_s`.

        Empty as well once the descriptor `also` is readable. Waits in the same way while the database is away.
        """
        self._connect()
        watched = [fd for fd in (self._descriptor(), also) if fd is not None]
        ready = ready_of(watched, timeout_s)
        if self._connection is None or self._descriptor() not in ready:
            return set()
        return self._received()

    def close(self) -> None:
        """Close the connection; `wait` opens another."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None

    def _descriptor(self) -> int | None:
        return None if self._connection is None else int(self._connection.fileno())

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

    def _received(self) -> set[str]:
        import psycopg

        try:
            return {notification.payload for notification in self._connection.notifies(timeout=0)}
        except psycopg.Error:
            # The connection is lost: a later `wait` opens another.
            self.close()
            return set()
