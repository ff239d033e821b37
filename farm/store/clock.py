"""The database's clock, which every process that shares a store has in common."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sqlalchemy import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    Clock = Callable[[Connection], int]

# Not now(), which is when the transaction began: this one may have waited for a lock.
_POSTGRESQL = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)")


def clock_ms(connection: Connection) -> int:
    """Return the time as the database has it; epoch, milliseconds."""
    if connection.dialect.name == "sqlite":
        # SQLite is part of this process: its 'now' is this clock, and asking for it would take ten times as long.
        return time.time_ns() // 1_000_000
    now_ms: int = connection.execute(_POSTGRESQL).scalar_one()
    return now_ms
