"""Clock of the database, common to all processes that share a store, and its answers over time."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection, text

from farm.base.machine import now_s

# Clock of the database, common to all processes that share a store.


Clock = Callable[[Connection], int]

# now() would be the start of the transaction, which may have waited for a lock since.
_POSTGRESQL = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)")


def clock_ms(connection: Connection) -> int:
    """Return the time of the database's clock; epoch, milliseconds."""
    if connection.dialect.name == "sqlite":
        # SQLite runs in this process and has the same clock; a query for it would take ten times as long.
        return time.time_ns() // 1_000_000
    now_ms: int = connection.execute(_POSTGRESQL).scalar_one()
    return now_ms


# Answers of a database over time: a holder of a lease counts as dead after one lease duration of them.


class Answers:
    """Time for which a database has answered without a gap that misses heartbeats. Written by one thread, read by all.

    A database that stood still, for example with its machine, received no heartbeats while its clock went on.
    """

    def __init__(self) -> None:
        self._answered_s = self._unbroken_s = now_s()

    def begin(self) -> None:
        """Count from now."""
        self._answered_s = self._unbroken_s = now_s()

    def note(self, ttl_s: float) -> None:
        """Record an answer of the database."""
        if (now := now_s()) - self._answered_s > _gap_s(ttl_s):
            self._unbroken_s = now
        self._answered_s = now

    def is_stable(self, ttl_s: float) -> bool:
        """Return whether the database has answered for `ttl_s`, the lifetime of a lease, up to now."""
        # The order matters: an answer recorded meanwhile stores a gap before it closes it.
        answered_s, now = self._answered_s, now_s()
        return now - answered_s <= _gap_s(ttl_s) and now - self._unbroken_s >= ttl_s


def _gap_s(ttl_s: float) -> float:
    # A lease due for renewal expires after another 0.7 of its lifetime: half a lifetime of silence counts as a gap.
    return ttl_s / 2
