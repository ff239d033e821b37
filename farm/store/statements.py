"""Named statements of `farm/store/sql`, whose files work unchanged in psql and sqlite3 (docs/reference/store.md)."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from importlib import resources
from typing import Any, TypeVar

from sqlalchemy import JSON, BindParameter, Boolean, bindparam, text

from farm.store import schema

# SQLite takes 32,766 parameters in a statement, PostgreSQL 65,535.
_MOST_PARAMETERS = 10_000
FEW = 500
"""Number of keys in a query for which PostgreSQL still uses an index, too."""

_Key = TypeVar("_Key", str, int)

_BLOCK = re.compile(r"^-- name: (\w+)\n(.*?);$", re.MULTILINE | re.DOTALL)
# SQLite returns columns of these types as stored: as text and as 0 or 1.
_TYPES: dict[str, Any] = {
    column.name: column.type
    for table in schema.metadata.tables.values()
    for column in table.columns
    if isinstance(column.type, JSON | Boolean)
}


@functools.cache
def _file(name: str) -> dict[str, str]:
    content = resources.files("farm.store").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")
    return dict(_BLOCK.findall(content))


@functools.cache
def statement(name: str) -> Any:
    """Return the statement `FILE.NAME`; a parameter after `IN` takes a list with at least one value."""
    file, _, block = name.partition(".")
    sql = _file(file)[block]
    lists: list[BindParameter[Any]] = [
        bindparam(found, expanding=True) for found in sorted(set(re.findall(r"\bIN :(\w+)", sql)))
    ]
    found = text(sql).bindparams(*lists)
    return found.columns(**_TYPES) if sql.startswith("SELECT") else found


def chunks(keys: Collection[_Key], most: int = _MOST_PARAMETERS) -> Iterator[list[_Key]]:
    """Yield names or row ids in portions for one statement."""
    listed = list(keys)
    for start in range(0, len(listed), most):
        yield listed[start : start + most]
