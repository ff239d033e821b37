"""Registry of devices: facts, names and health between runs, and quarantines to notify users about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, Row, and_, func, or_, select, update

from farm.base.errors import LeaseLostError, UnknownNameError, UsageError
from farm.base.forms import NAME
from farm.base.socs import is_soc
from farm.base.text import clean_text, one_line
from farm.devices.device import RECOVERY, Device, Event, Health, HealthEvent
from farm.devices.facts import DeviceStatus
from farm.store import rows, schema, values
from farm.store.leases.rows import device_key, lease_row, lock_names
from farm.store.statements import Group

if TYPE_CHECKING:
    from collections.abc import Callable


# Registry of devices: when each last answered, whether it is in service, its name, labels and health.


_LABELS_LIMIT = 32
_TEXTS = ("serial", "host", "soc", "kind", "os", "product")
# Facts of a device that has no name, health event or status yet.
_AS_NEW: dict[str, Any] = {
    **dict.fromkeys(("name", "service_note", "service_user"), ""),
    "labels": [],
    "in_service": True,
    "health": "healthy",
    "health_reason": "",
    "status": None,
}


class Seen(msgspec.Struct, frozen=True):
    """Device that has just answered, and its state."""

    device: Device
    state: str
    """Connection state by adb, `device` for a usable one; other kinds of connection have states of their own."""
    status: DeviceStatus | None
    """Status; None keeps the stored one."""


class Registered(msgspec.Struct, frozen=True):
    """Registry entry of a device. Its texts are safe to show, although other users wrote them."""

    id: str
    serial: str
    """Serial; empty, like the following facts, for a device that never answered."""
    host: str = ""
    soc: str = ""
    kind: str = ""
    os: str = ""
    product: str = ""
    name: str = ""
    labels: tuple[str, ...] = ()
    in_service: bool = True
    service_note: str = ""
    """Reason for being out of service."""
    service_user: str = ""
    """User who took it out of service, or put it back."""
    health: str = ""
    """`healthy`, `suspect` or `quarantined`."""
    health_reason: str = ""
    status: DeviceStatus | None = None
    state: str = ""
    last_seen_ms: int = 0
    """Time of the last answer, on the database's clock; 0 without one."""
    forgotten_ms: int = 0
    """Time of `farm devices remove`, on the same clock; 0 for a device that answered since."""

    @property
    def called(self) -> str:
        """Name of the device in messages: its name, or its id."""
        return self.name or self.id


class Registry(Group):
    """Registry of a store's devices. Every method is one transaction; raises StoreError for errors of the database."""

    def see(self, seen: Sequence[Seen]) -> None:
        """Record that devices answered, and their status; a name and labels of farm.toml replace the stored ones."""

        def upsert(connection: Connection) -> None:
            now_ms = self._clock(connection)
            # A common order of rows keeps two writers from waiting for each other.
            for one in sorted(seen, key=lambda one: one.device.id):
                _change(connection, one.device.id, _seen_row(one, now_ms))

        if seen:
            self._database.write(upsert)

    def all(self, *, forgotten: bool = False) -> list[Registered]:
        """Return all registered devices, sorted by id; forgotten devices only with `forgotten`."""
        row = schema.device_state.c
        query = select(schema.device_state).order_by(row.id)
        query = query if forgotten else query.where(row.forgotten_ms == 0)
        return [_registered(found) for found in self._rows(query)]

    def forget(self, device: str) -> None:
        """Remove a device from every list until it answers again, then without its former name, labels and health.

        A quarantine stays, since only `farm devices unquarantine` ends it. Runs and health events stay as well. Raises
        UnknownNameError, LeaseLostError for a leased or reserved device.
        """
        key = device_key(device)

        def change(connection: Connection) -> None:
            lock_names(connection)
            now_ms = self._clock(connection)
            lease = lease_row(connection, key)
            if owner := lease.reserved_by(now_ms) or (lease.user if lease.is_held(now_ms) else ""):
                holder = f"leased or reserved by {_shown(owner)}"
                raise LeaseLostError(f"{key} is {holder}: run 'farm devices release {key}' first")
            facts = {**_AS_NEW, "forgotten_ms": now_ms}
            row = schema.device_state.c
            if connection.scalar(select(row.health).where(row.id == key)) == Health.QUARANTINED:
                facts = {name: value for name, value in facts.items() if name not in ("health", "health_reason")}
            _change_row(connection, key, facts)

        self._database.write(change)

    def set_service(self, device: str, in_service: bool, note: str, user: str) -> None:
        """Put a device in or out of service; out of service it gets no new lease. Raises UnknownNameError."""
        facts = {
            "in_service": in_service,
            "service_note": values.clean(_shown(" ".join(note.split()))),
            "service_user": values.clean(_shown(user), values.NAME_LIMIT),
        }
        self._change_known(device, facts)

    def set_name(self, device: str, name: str | None, labels: Sequence[str] | None) -> None:
        """Name and label a device; farm.toml takes precedence. None keeps the present value, an empty one removes it.

        Raises UnknownNameError, UsageError for an illegal name, the name of a SoC or of another device.
        """
        facts: dict[str, Any] = {}
        if name is not None:
            if name:
                _check_name("name", name)
            if is_soc(name):
                raise UsageError(f"{name!r} is an SoC: choose another name")
            facts["name"] = name
        if labels is not None:
            for label in labels:
                _check_name("label", label)
            if len(labels) > _LABELS_LIMIT:
                raise UsageError(f"a device has at most {_LABELS_LIMIT} labels, these are {len(labels)}")
            facts["labels"] = list(dict.fromkeys(labels))
        self._change_known(device, facts, name or "")

    def record_health(self, event: HealthEvent) -> None:
        """Record a health event of a device, registered or not, and the health that follows from it.

        A step of a recovery changes neither the health nor its reason. Only `farm devices unquarantine` ends a
        quarantine.
        """

        def insert(connection: Connection) -> None:
            row = _event_row(event, event.time_ms or self._clock(connection))
            state = schema.device_state.c
            before = connection.scalar(select(state.health).where(state.id == row["device"]))
            if before == Health.QUARANTINED and event.event != Event.RELEASED:
                row["state"] = before
            elif event.event != RECOVERY:
                # Events of recovery steps do not come here: their outcome is no reason for a state.
                _change(connection, event.device, {"health": row["state"], "health_reason": row["reason"]})
            connection.execute(schema.health_event.insert(), row)

        self._database.write(insert)

    def health_events(self, device: str, limit: int) -> list[HealthEvent]:
        """Return the newest events of a device, newest first."""
        event = schema.health_event.c
        newest = select(schema.health_event).where(event.device == device_key(device)).order_by(event.id.desc())
        return [
            HealthEvent(
                device=row.device,
                event=row.event,
                state=row.state,
                reason=_shown(row.reason),
                detail=row.detail,
                latency_ns=values.unpack_floats(row.latency_ns),
                time_ms=row.time_ms,
            )
            for row in self._rows(newest.limit(limit))
        ]

    def health(self, device: str) -> tuple[str, str]:
        """Return state and reason of a device: ("healthy", "") for an unknown device."""
        row = schema.device_state.c
        query = select(row.health, row.health_reason).where(row.id == device_key(device))
        return next(((row.health, row.health_reason) for row in self._rows(query)), ("healthy", ""))

    def _change_known(self, device: str, facts: Mapping[str, Any], name: str = "") -> None:
        row = schema.device_state.c

        def change(connection: Connection) -> None:
            if name:
                same = or_(row.name == name, row.serial == name, row.id == name)
                other = connection.scalar(select(row.id).where(same, row.id != device_key(device)))
                if other is not None:
                    raise UsageError(f"{other} is called {name!r} already: choose another name")
                if connection.scalar(select(row.id).where(func.lower(row.soc) == name.lower())) is not None:
                    raise UsageError(f"{name!r} is an SoC: choose another name")
            _change_row(connection, device_key(device), facts)

        self._database.write(change)


def _event_row(event: HealthEvent, time_ms: int) -> dict[str, Any]:
    detail = {values.clean(name): _clean(value) for name, value in event.detail.items()}
    facts = {"detail": detail, "latency_ns": values.pack_floats(event.latency_ns), "time_ms": time_ms}
    return rows.fitted(schema.health_event, **msgspec.structs.asdict(event) | facts)


def _clean(value: str | float) -> str | float:
    # JSON has neither NaN nor infinity.
    return value if isinstance(value, int | float) and math.isfinite(value) else values.clean(str(value))


def _check_name(kind: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a {kind}: expected at most 64 letters, digits, '.', '_' and '-', "
            "the first a letter or a digit"
        )


def _shown(text: str) -> str:
    """Return text without control sequences of terminals."""
    return clean_text(text, values.REASON_LIMIT, lines=True)


def _seen_row(seen: Seen, now_ms: int) -> dict[str, Any]:
    device = seen.device
    row = {name: getattr(device, name) for name in _TEXTS}
    row |= {"state": seen.state, "last_seen_ms": now_ms, "forgotten_ms": 0}
    if device.name:
        row["name"] = device.name
    if device.labels:
        row["labels"] = [values.clean(label, values.NAME_LIMIT) for label in device.labels[:_LABELS_LIMIT]]
    if seen.status is not None:
        row["status"] = msgspec.to_builtins(seen.status)
    return rows.fitted(schema.device_state, **row)


def _change(connection: Connection, device: str, facts: Mapping[str, Any]) -> None:
    """Change the row of a device; creates a missing row."""
    key = device_key(device)
    new = {**dict.fromkeys((*_TEXTS, "state"), ""), **_AS_NEW, "id": key, "last_seen_ms": 0}
    rows.insert_missing(connection, schema.device_state, [new])
    connection.execute(update(schema.device_state).where(schema.device_state.c.id == key).values(dict(facts)))


def _change_row(connection: Connection, key: str, facts: Mapping[str, Any]) -> None:
    """Change the row of a device. Raises UnknownNameError."""
    row = schema.device_state.c
    if not connection.execute(update(schema.device_state).where(row.id == key).values(dict(facts))).rowcount:
        raise UnknownNameError("device", key, connection.scalars(select(row.id)), "(farm devices lists them)")


def _registered(row: Row[Any]) -> Registered:
    facts = dict(row._mapping)  # noqa: SLF001 - public in SQLAlchemy
    # Rows written by other versions may contain control characters. The id stays, because other rows refer to it.
    clean = {name: _shown(text) for name, text in facts.items() if isinstance(text, str) and name != "id"}
    labels = tuple(_shown(label) for label in row.labels)
    return Registered(**facts | clean | {"labels": labels, "status": _status(row.status)})


def _status(found: Any) -> DeviceStatus | None:
    try:
        return None if found is None else msgspec.convert(found, DeviceStatus)
    except msgspec.ValidationError:
        # A status written by another version of farm may be unreadable: the next answer of the device replaces it.
        return None


# Quarantines due for a notice, each given to one process only once.


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


class Quarantines(Group):
    """Quarantines of a store. Every method is one transaction; raises StoreError for errors of the database."""

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
        event = HealthEvent(one.device, NOTICE, Health.QUARANTINED, _UNKNOWN)
        new = schema.health_event.insert().values(_event_row(event, self._clock(connection)))
        claim = connection.execute(new.returning(schema.health_event.c.id)).scalar_one()
        return msgspec.structs.replace(one, claim=claim)

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
            facts = {name: _bounded(getattr(row, name)) for name in ("name", "serial", "soc", "kind", "host")}
            began = since[-1]
            facts |= {"reason": _bounded(row.health_reason), "run": _bounded(str(began.detail.get("run", "")))}
            found.append(msgspec.convert({"device": row.id, "since_ms": began.time_ms, **facts}, Quarantine))
        return found


def _bounded(text: str) -> str:
    return one_line(text, values.REASON_LIMIT)
