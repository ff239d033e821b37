"""Results of several jobs at once -> rows of attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.store import rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from farm.store.cluster.records import ShardResult


def insert_results(connection: Connection, run_id: str, results: Iterable[ShardResult]) -> None:
    """Insert the attempts of jobs of a run, with all their numbers; those that are there already stay as they are."""
    for result in results:
        for n, attempt in enumerate(result.attempts, 1):
            artifacts = result.artifacts if n == len(result.attempts) else ()
            rows.insert_attempt(connection, run_id, rows.bounded(attempt), None, artifacts)
