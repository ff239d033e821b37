"""Quarantines due for a notice, each given to one process only once."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Connection, and_, select, update

from farm.base.text import one_line
from farm.devices.health import Health
from farm.store import schema, values
from farm.store.clock import Clock, clock_ms
from farm.store.leases.rows import lock_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.store.database import Database

NOTICE = "notice"
"""Health event that claims the notice of a quarantine; its reason records the outcome of the notice."""

_UNKNOWN = "on its way"
"""Outcome of a notice before the first answer."""
# Older quarantines are history: a new [notify] in farm.toml is for later events alone.
_NEWS_MS = 86_400_000
# A device in quarantine is not used, and has few events.
_LOOKED_AT = 100


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Quarantine of a device, for a notice. Its texts are safe to show, although other users wrote them."""

    device: str
    """Id of the device."""
    name: str = ""
    serial: str = ""
    soc: str = ""
    kind: str = ""
    host: str = ""
    reason: str
    since_ms: int
    """Time of the quarantine on the database's clock; epoch, milliseconds."""
    run: str = ""
    """Run in which it happened; empty outside of runs."""
    claim: int = 0
    """Id of the event that claims its notice."""


class Quarantines:
    """Quarantines of a store. Every method is one transaction; raises StoreError for errors of the database."""

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        self._database, self._clock = database, clock

    def claim(self, queue: Callable[[Connection, Quarantine], object] = lambda *_: None) -> list[Quarantine]:
        """Return the quarantines of the last day that no earlier call has returned: each only once.

        `queue` is called with each of them in the same transaction.
        """
        with self._database.reading() as connection:
            if not self._unclaimed(connection):
                return []

        def claim(connection: Connection) -> list[Quarantine]:
            # Lock, so that a quarantine goes to a single one among simultaneous callers.
            lock_names(connection)
            claimed = [self._claim(connection, one) for one in self._unclaimed(connection)]
            for one in claimed:
                queue(connection, one)
            return claimed

        return self._database.write(claim)

    def add_outcome(self, claim: int, outcome: str) -> None:
        """Add the outcome of a notice for one receiver to the event that claims it."""
        event = schema.health_event.c
        is_claim = and_(event.id == claim, event.event == NOTICE)

        def add(connection: Connection) -> None:
            known = connection.scalar(select(event.reason).where(is_claim).with_for_update())
            reason = outcome if known in (None, _UNKNOWN) else f"{known}; {outcome}"
            connection.execute(update(schema.health_event).where(is_claim).values(reason=values.clean(reason)))

        self._database.write(add)

    def _claim(self, connection: Connection, one: Quarantine) -> Quarantine:
        facts = {
            "device": one.device,
            "event": NOTICE,
            "state": str(Health.QUARANTINED),
            "reason": _UNKNOWN,
            "detail": {},
            "latency_ns": values.pack_floats(()),
            "time_ms": self._clock(connection),
        }
        key = connection.execute(schema.health_event.insert(), facts).inserted_primary_key
        assert key is not None  # noqa: S101 - of one row that was inserted
        return msgspec.structs.replace(one, claim=int(key[0]))

    def _unclaimed(self, connection: Connection) -> list[Quarantine]:
        state, event = schema.device_state.c, schema.health_event.c
        now_ms = self._clock(connection)
        found = []
        query = select(schema.device_state).where(state.health == str(Health.QUARANTINED)).order_by(state.id)
        for row in connection.execute(query).all():
            newest = select(schema.health_event).where(event.device == row.id).order_by(event.id.desc())
            events = connection.execute(newest.limit(_LOOKED_AT)).all()
            since = list(takewhile(lambda one: one.state == Health.QUARANTINED, events))
            if not since or any(one.event == NOTICE for one in since) or since[-1].time_ms < now_ms - _NEWS_MS:
                continue
            facts = {name: _shown(getattr(row, name)) for name in ("name", "serial", "soc", "kind", "host")}
            began = since[-1]
            facts |= {"reason": _shown(row.health_reason), "run": _shown(str(began.detail.get("run", "")))}
            found.append(msgspec.convert({"device": row.id, "since_ms": began.time_ms, **facts}, Quarantine))
        return found


def _shown(text: str) -> str:
    return one_line(text, values.REASON_LIMIT)
