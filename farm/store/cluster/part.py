"""Common base of the groups of a shared farm's rows.

Unreadable rows, of another version or a hostile user, are set aside with a reason, so that others go on.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sqlalchemy import Connection, TextClause, text

from farm.base.errors import UnreadableRowError
from farm.store.statements import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        connection.execute(statement, facts)


_T = TypeVar("_T")
_MOST_UNREADABLE = 100
"""Most rows that a call sets aside."""
CHANNEL = "farm"
"""PostgreSQL channel of hints to agents and clients to look at the tables; a hint itself proves nothing."""

_NOTIFY = text("SELECT pg_notify(:channel, hint) FROM unnest(CAST(:hints AS text[])) AS hint")


class ClusterPart(Group):
    """Group of rows; every public method of a subclass is one transaction and raises StoreError."""

    def set_aside(self, error: UnreadableRowError) -> None:
        """Refuse the runs that an unreadable row belongs to."""
        self._database.write(lambda connection: set_aside(connection, error))

    def _write(self, action: Callable[[Connection], _T]) -> _T:
        """Call `action` in one transaction; after an unreadable row, set the row aside and repeat."""
        for _ in range(_MOST_UNREADABLE):
            try:
                return self._database.write(action)
            except UnreadableRowError as error:
                self.set_aside(error)
        return self._database.write(action)


def notify(connection: Connection, hints: Iterable[str]) -> None:
    """Send hints to all listeners when the transaction commits: `work SM8650`, `cancel RUN`."""
    if listed := sorted(set(hints)):
        connection.execute(_NOTIFY, {"channel": CHANNEL, "hints": listed})
