"""Named statements of `farm/store/sql`, whose files work unchanged in psql and sqlite3 (docs/reference/store.md), and
the base of the groups that execute them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from typing import Any, TypeVar

import msgspec
from sqlalchemy import JSON, BindParameter, Boolean, Connection, Row, bindparam, text

from farm.store import schema
from farm.store.clock import Clock, clock_ms
from farm.store.database import Database

# SQLite takes 32,766 parameters in a statement, PostgreSQL 65,535.
_MOST_PARAMETERS = 10_000
KEYS: BindParameter[Any] = bindparam("keys", expanding=True)
"""Parameter of a query for `in_parts`."""
FEW = 500
"""Number of keys in a query for which PostgreSQL still uses an index, too."""

_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

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


def struct_of(kind: type[_Struct], row: Row[Any], **more: Any) -> _Struct:
    """Return a row as a struct by the names of its columns; `more` has further fields, UNSET for an unset one.

    Processes that read in several threads call `farm.base.toml_tables.prepare_decoders` before.
    """
    fields = {**row._mapping, **more}  # noqa: SLF001 - public in SQLAlchemy
    named = {name: fields[name] for name in kind.__struct_encode_fields__ if name in fields}
    known = {name: value for name, value in named.items() if value is not msgspec.UNSET}
    return msgspec.convert(known, kind, strict=False)


def chunks(keys: Collection[_T], most: int = _MOST_PARAMETERS) -> Iterator[list[_T]]:
    """Yield values in portions for one statement."""
    listed = list(keys)
    for start in range(0, len(listed), most):
        yield listed[start : start + most]


def in_parts(
    connection: Connection, query: Any, keys: Collection[_T], most: int = _MOST_PARAMETERS, **of: Any
) -> Iterator[Any]:
    """Yield the rows of a query whose parameter `keys` is a list, as of one statement, for any number of keys."""
    for part in chunks(keys, most):
        yield from connection.execute(query, {"keys": part, **of})


class Group:
    """Group of a store's methods. Every method is one transaction and raises StoreError if the database refuses."""

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        self._database, self._clock = database, clock

    def _rows(self, query: Any, /, **of: Any) -> Sequence[Any]:
        """Return the rows of a query, or of the statement of that name, in a transaction of its own."""
        with self._database.reading() as connection:
            return connection.execute(statement(query) if isinstance(query, str) else query, of).all()

    def _value(self, name: str, /, **of: Any) -> Any:
        """Return the first value of the statement `name`, in a transaction of its own; None without a row."""
        with self._database.reading() as connection:
            return connection.scalar(statement(name), of)
