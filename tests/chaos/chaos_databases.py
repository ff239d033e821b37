"""Databases of a disturbed farm, and how each is away for a while: chaos.py."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from chaos_store import Cluster, PostgresStore

_COUNTS = "SELECT (SELECT count(*) FROM attempt), (SELECT count(*) FROM health_event)"
_LOCK_S, _ANSWER_S = 5.0, 3


class Disturbed(Protocol):
    """A database that can be away."""

    name: str
    url: str
    ways: Sequence[str]
    """How it can be away."""

    def leave(self, way: str) -> None:
        """Let it be away."""

    def come_back(self) -> None:
        """Let it be there again; may be called when it is."""

    def counts(self) -> tuple[int, ...] | None:
        """Return how much is in it, None where it does not answer."""


class DisturbedSqlite:
    """A file in the state folder of a round; it is away while another process writes and does not end."""

    name = "SQLite"
    ways = ("locked",)

    def __init__(self, file: Path) -> None:
        self._file, self.url = file, f"sqlite:///{file}"
        self._holder: sqlite3.Connection | None = None

    def leave(self, way: str) -> None:
        del way
        if not self._file.exists() or self._holder is not None:
            return
        holder = sqlite3.connect(self._file, timeout=_LOCK_S, isolation_level=None, check_same_thread=False)
        try:
            holder.execute("BEGIN IMMEDIATE")
            self._holder = holder
        except sqlite3.Error:
            holder.close()

    def come_back(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()

    def counts(self) -> tuple[int, ...] | None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=1.0)) as connection:
                return tuple(connection.execute(_COUNTS).fetchone())
        except sqlite3.Error:
            return None


class DisturbedPostgres(PostgresStore):
    """A database of a server that stops, freezes or starts again."""

    name = "PostgreSQL"
    ways = ("stopped", "frozen", "restarted")

    def __init__(self, cluster: Cluster, database: str) -> None:
        super().__init__(cluster, database)
        self._where = (
            f"host={cluster.folder} port={cluster.port} user=farm connect_timeout={_ANSWER_S} dbname={database}"
            f" options='-c statement_timeout={_ANSWER_S}s'"
        )

    def leave(self, way: str) -> None:
        if way == "frozen":
            self._cluster.freeze()
        else:
            self._cluster.stop()
        if way == "restarted":
            self._cluster.start()

    def come_back(self) -> None:
        self._cluster.thaw()
        self._cluster.start()

    def counts(self) -> tuple[int, ...] | None:
        import psycopg

        try:
            with psycopg.connect(self._where) as connection:
                row = connection.execute(_COUNTS).fetchone()  # type: ignore[arg-type]
        except psycopg.Error:
            return None
        return tuple(row) if row else None
