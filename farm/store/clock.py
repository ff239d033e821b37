"""Clock of the database, common to all processes that share a store."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection, text

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
