"""Unreadable rows, of another version or a hostile user: set aside with a reason, so that others go on."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, TextClause, text

from farm.base.errors import UnreadableRowError

REFUSED_BY = "farm: a row of the run cannot be read"
"""Value in place of the user who cancelled a run."""

_CANCEL = "UPDATE run_order SET state = 'cancelled', cancelled_by = :by WHERE state <> 'ended' AND run_id = "
_STATEMENTS: dict[str, tuple[TextClause, ...]] = {
    "run_order": (text(f"{_CANCEL}:key"),),
    "shard_jobs": (
        text("UPDATE shard SET state = 'ended', why = :why WHERE id = :key"),
        text(f"{_CANCEL}(SELECT run_id FROM shard WHERE id = :key)"),  # noqa: S608 - a constant
    ),
}


@contextlib.contextmanager
def reading(table: str, key: str | int) -> Iterator[None]:
    """Raise UnreadableRowError if the body cannot read a row of `table`, a table that `set_aside` knows."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, zlib.error) as error:
        raise UnreadableRowError(table, key, f"{type(error).__name__}: {error}") from None


def set_aside(connection: Connection, error: UnreadableRowError) -> None:
    """Refuse the runs that an unreadable row belongs to: the row is not read again."""
    facts: dict[str, Any] = {"key": error.key, "by": REFUSED_BY, "why": str(error)}
    for statement in _STATEMENTS[error.table]:
        named = {name: facts[name] for name in statement.compile().params}
        connection.execute(statement, named)
