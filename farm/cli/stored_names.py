"""Names in the store for shell completion, read by the database's driver: SQLAlchemy takes too long to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

_SQLITE = "sqlite:///"
# Seconds to wait for a locked or unreachable store.
_WAIT_S = 0.1
_WAIT_MS = 150

QUERIES = {
    "runs": "SELECT id FROM run ORDER BY started_ms DESC LIMIT 100",
    "run_names": "SELECT run_name FROM run WHERE run_name <> '' GROUP BY 1 ORDER BY max(started_ms) DESC LIMIT 50",
    "jobs": "SELECT name FROM job ORDER BY name LIMIT 5000",
    "cases": "SELECT DISTINCT suite || '/' || case_name FROM job ORDER BY 1 LIMIT 5000",
    "devices": "SELECT DISTINCT name FROM device_state WHERE name <> '' ORDER BY 1 LIMIT 500",
    "serials": "SELECT serial FROM device_state ORDER BY last_seen_ms DESC LIMIT 500",
    "labels": "SELECT DISTINCT labels FROM device_state LIMIT 500",
    "metrics": "SELECT DISTINCT metric FROM series ORDER BY 1 LIMIT 500",
    "branches": "SELECT DISTINCT run_branch FROM run WHERE run_branch <> '' ORDER BY 1 LIMIT 100",
}


def stored(url: str, *names: str) -> Iterator[str]:
    """Yield the first column of each of the QUERIES `names`. Raises the errors of the database driver."""
    with closing(_connected(url)) as connection:
        cursor = connection.cursor()
        for name in names:
            cursor.execute(QUERIES[name])
            yield from (str(row[0]) for row in cursor.fetchall() if row[0])


def _connected(url: str) -> Any:
    if "://" not in url or url.startswith(_SQLITE):
        import sqlite3

        path = Path(url.removeprefix(_SQLITE)).absolute()
        return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_WAIT_S)
    import psycopg

    scheme, _, rest = url.partition("://")
    address = f"{scheme.partition('+')[0]}://{rest}"
    return psycopg.connect(address, connect_timeout=1, options=f"-c statement_timeout={_WAIT_MS}")
