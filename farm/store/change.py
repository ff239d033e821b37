"""Detection of commits to a database since an earlier look, by any process and to any table."""

from __future__ import annotations

import threading
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

# Transactions visible to a reader, with server and database. Equal answers mean equal data: a finished transaction
# stays committed or rolled back. (Every server version has the name txid_current_snapshot.)
_SNAPSHOT = text(
    "SELECT txid_current_snapshot()::text, pg_postmaster_start_time()::text, oid::text "
    "FROM pg_database WHERE datname = current_database()"
)


class Changes:
    """Version of the data that a reader of a database would see; usable from several threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._pooled: Any = None

    def version(self) -> tuple[Any, ...]:
        """Return a version that equals an earlier version of this object only without a commit in between.

        Raises DBAPIError.
        """
        if self._engine.dialect.name == "sqlite":
            return (self._sqlite(),)
        with self._engine.connect() as connection:
            return tuple(connection.execute(_SNAPSHOT).one())

    def close(self) -> None:
        """Give back the connection."""
        with self._lock:
            if self._pooled is not None:
                self._pooled.close()
                self._pooled = None

    def _sqlite(self) -> int:
        import sqlite3

        query = "PRAGMA data_version"
        with self._lock:
            if self._pooled is None:
                # SQLite counts the commits of all others, for one connection alone: this one is kept, and only reads.
                self._pooled = self._engine.raw_connection()
            try:
                return int(self._pooled.driver_connection.execute(query).fetchone()[0])
            except sqlite3.Error as error:
                raise OperationalError(query, None, error) from error
