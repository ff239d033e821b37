"""NOTIFY as a hint that there is news: what is missed is found by looking, so that a lost hint costs time alone."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from farm.store.store import Store

CHANNEL = "farm"
"""Its payloads are a word and a name: `work SM8650`, `cancel RUN`, `ended RUN`, `result RUN`."""

_AGAIN_SECONDS = 2.0


class Hints:
    """A connection of its own that listens. Of one thread."""

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
        """Return what was notified as soon as there is something; empty after `timeout_s`.

        Empty as well once the descriptor `also` can be read. Where the database is away it waits all the same.
        """
        self._connect()
        watched = [fd for fd in (self._descriptor(), also) if fd is not None]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
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

        if self._connection is not None or time.monotonic() - self._tried_s < _AGAIN_SECONDS:
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
            # It is gone: opened again in a while.
            self.close()
            return set()
