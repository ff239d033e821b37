"""Statements that a store executes, and SQLite's plans for its queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from farm.store.store import Store


@contextmanager
def statements(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Yield the list of statements, with their parameters, that a store executes in the block."""
    asked: list[tuple[str, Any]] = []

    def listen(*call: Any) -> None:
        asked.append((call[2], call[3]))

    event.listen(store._database._engine, "before_cursor_execute", listen)
    yield asked
    event.remove(store._database._engine, "before_cursor_execute", listen)


def plans(store: Store, asked: list[tuple[str, Any]]) -> list[list[str]]:
    """Return the steps of SQLite's plans for the queries among statements."""
    queries = [one for one in asked if one[0].lstrip().startswith("SELECT")]
    with store._database.reading() as connection:
        return [
            [str(row.detail) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", parameters)]
            for query, parameters in queries
        ]
