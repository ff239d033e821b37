"""Quotas: the most devices that a user has at once, of all or of a label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Connection, delete, select, text

from farm.base.errors import UsageError
from farm.policy.situation import LABEL, USER
from farm.store import schema, values

if TYPE_CHECKING:
    from farm.store.clock import Clock
    from farm.store.database import Database

_SUBJECT_LIMIT = 320
_SET = text("""
    INSERT INTO quota (subject, most, set_by, set_ms) VALUES (:subject, :most, :by, :now_ms)
    ON CONFLICT (subject) DO UPDATE SET most = excluded.most, set_by = excluded.set_by, set_ms = excluded.set_ms
""")


class Quotas:
    """Quotas of a store. Every method is one transaction and raises StoreError."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def all(self) -> dict[str, int]:
        """Return the quotas by subject: `user:ada` or `label:camera`."""
        with self._database.reading() as connection:
            return read_quotas(connection)

    def set(self, subject: str, most: int | None, by: str) -> None:
        """Set a quota, or remove it with None. Raises UsageError for an illegal subject or number."""
        kind = next((kind for kind in (USER, LABEL) if subject.startswith(kind)), "")
        if not kind or subject == kind:
            raise UsageError(f"quota: {subject!r} is neither {USER}NAME nor {LABEL}NAME")
        if most is not None and not 0 <= most < 2**31:
            raise UsageError(f"quota: {most} is no number of devices")
        key = values.clean(subject, _SUBJECT_LIMIT)

        def change(connection: Connection) -> None:
            if most is None:
                connection.execute(delete(schema.quota).where(schema.quota.c.subject == key))
                return
            row = {"subject": key, "most": most, "by": values.clean(by, values.NAME_LIMIT)}
            connection.execute(_SET, {**row, "now_ms": self._clock(connection)})

        self._database.write(change)


def read_quotas(connection: Connection) -> dict[str, int]:
    """Return the quotas by subject."""
    row = schema.quota.c
    found = connection.execute(select(row.subject, row.most).order_by(row.subject))
    return {one.subject: one.most for one in found}
