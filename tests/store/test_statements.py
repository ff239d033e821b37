"""Named statements of farm/store/sql work unchanged in psql and sqlite3."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from farm.store.statements import statement
from farm.store.store import open_store

_ROOT = Path(__file__).parents[2]
_BLOCKS = {
    f"{path.stem}.{name}": sql
    for path in sorted((_ROOT / "farm/store/sql").glob("*.sql"))
    for name, sql in re.findall(r"^-- name: (\w+)\n(.*?;)$", path.read_text(), re.MULTILINE | re.DOTALL)
}


def _lists(sql: str) -> set[str]:
    return set(re.findall(r"\bIN :(\w+)", sql))


def test_psql_takes_every_statement(new_database: Callable[[str], str], postgresql_cluster: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")
    open_store(new_database("statements")).close()
    script = "".join(
        "".join(f"\\set {name} {'(NULL)' if name in _lists(sql) else 'NULL'}\n" for name in re.findall(r":(\w+)", sql))
        + f"EXPLAIN {sql}\n"
        for sql in _BLOCKS.values()
    )
    argv = [psql, "-qX", "-v", "ON_ERROR_STOP=1", "-h", postgresql_cluster, "-U", "farm", "statements"]
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_sqlite_takes_every_statement(tmp_path: Path) -> None:
    open_store(tmp_path / "farm.db").close()
    connection = sqlite3.connect(tmp_path / "farm.db")
    for name, sql in _BLOCKS.items():
        assert statement(name) is statement(name)
        parameters = dict.fromkeys(re.findall(r":(\w+)", sql))
        written = re.sub(r"\bIN :\w+", "IN (NULL)", sql)
        assert connection.execute(f"EXPLAIN QUERY PLAN {written}", parameters).fetchall() is not None, name
    connection.close()
