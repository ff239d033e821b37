"""Rows of leases and waiters, as functions of a connection: the steps of `farm.store.leases.leasing`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, func, or_, select, text, update

from farm.base.errors import LeaseLostError
from farm.policy.situation import Lease, Priority, Request, Waiting
from farm.store import schema, values
from farm.store.rows import insert_missing

# Keys of advisory locks, the same in every farm and unlike the key of migrations: names of devices, and the first half
# of the key of a SoC.
_NAMES_LOCK = 0x6C656173
_SOC_LOCK = 0x736F63

# Uptime of the server in milliseconds: holders could not renew leases before, and may still return for them.
_UP_MS = "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) * 1000"

# Statements are built once: waiting processes execute them three times a second.
_lease_row, _waiter_row, _state_row = schema.lease.c, schema.waiter.c, schema.device_state.c
LEASE_COLUMNS = (*schema.lease.c, _lease_row.user_name.label("user"))
_LEASES = (
    select(*LEASE_COLUMNS)
    .where((_lease_row.token != "") | (_lease_row.reserved_until_ms > bindparam("now_ms")))
    .order_by(_lease_row.device)
)
# Leases of devices without an agent, and of some more devices.
_LEASES_BESIDE_AGENTS = _LEASES.outerjoin(schema.agent_device, schema.agent_device.c.device == _lease_row.device).where(
    or_(schema.agent_device.c.device.is_(None), _lease_row.device.in_(bindparam("also", expanding=True)))
)
_TAKEN = select(_lease_row.device).where(_lease_row.token != "", _lease_row.expires_ms > bindparam("now_ms"))
_WAITER = select(schema.waiter).where(_waiter_row.id == bindparam("token"))
_WAITING = text("""
    SELECT id, devices, wanted AS "count", user_name AS "user", host, pid, purpose, priority, since_ms FROM waiter
    WHERE expires_ms > :now_ms AND wanted > 0 ORDER BY priority DESC, since_ms, id
""")
_LEASE = select(*LEASE_COLUMNS).where(_lease_row.device == bindparam("of"))
# SQLite ignores this clause, and does not need it in a writing transaction.
_LIVE = _LEASE.with_for_update(read=True)
# Agents take devices under a lock of the SoC alone.
_OWN = _LEASE.with_for_update()
_TAKE = text("""
    UPDATE lease SET fence = :fence, token = :token, user_name = :user, host = :host, pid = :pid, purpose = :purpose,
                     priority = :priority, acquired_ms = :acquired_ms, expires_ms = :expires_ms, wanted_by = ''
    WHERE device = :device
""")
GIVE_BACK = (
    update(schema.lease)
    .where(_lease_row.device == bindparam("of"), _lease_row.fence == bindparam("was"), _lease_row.token != "")
    .values(token="", expires_ms=0, wanted_by="")
)
KEEP_PLACE = update(schema.waiter).where(_waiter_row.id == bindparam("of")).values(expires_ms=bindparam("alive_ms"))
SERVED = KEEP_PLACE.values(wanted=bindparam("left"))
WITHDRAW = delete(schema.waiter).where(_waiter_row.id == bindparam("of"))
FORGET = delete(schema.waiter).where(_waiter_row.expires_ms < bindparam("long_ago_ms"))
BEGIN = schema.waiter.insert()
# Devices for waiters that always precede this one: more urgent or older requests of its user for the same devices.
_AHEAD = select(func.sum(_waiter_row.wanted)).where(
    _waiter_row.expires_ms > bindparam("now_ms"),
    _waiter_row.wanted > 0,
    _waiter_row.devices == bindparam("devices"),
    _waiter_row.user_name == bindparam("user_name"),
    (_waiter_row.priority > bindparam("priority"))
    | ((_waiter_row.priority == bindparam("priority")) & (_waiter_row.since_ms < bindparam("since_ms"))),
)
_MARKED = select(_lease_row.device).where(
    _lease_row.device.in_(bindparam("devices", expanding=True)), _lease_row.wanted_by != ""
)
_WAKE = text("""
    SELECT pg_notify('farm', 'work ' || soc)
    FROM (SELECT DISTINCT soc FROM agent_device WHERE device = ANY(:devices)) AS theirs
""")
_LOCK = text("SELECT pg_advisory_xact_lock(:key, hashtext(:soc))")


def lock_names(connection: Connection) -> None:
    """Block other changes of device names, and other claims of notices, until the transaction ends."""
    # SQLite has one writer at a time.
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _NAMES_LOCK})


def lock_soc(connection: Connection, soc: str) -> None:
    """Block all other decisions about the devices of a SoC until the transaction ends."""
    if connection.dialect.name != "sqlite":
        connection.execute(_LOCK, {"key": _SOC_LOCK, "soc": soc})


def wake_agents(connection: Connection, devices: Iterable[str]) -> None:
    """Wake the agents of a shared farm after the commit: devices became free, or processes wait for them."""
    if connection.dialect.name != "sqlite":
        connection.execute(_WAKE, {"devices": list(map(device_key, devices))})


def always_stable() -> bool:
    """Return True, for callers that do not observe the database's answers over time."""
    return True


def is_stable(connection: Connection, ttl_ms: int, answered: Callable[[], bool] = always_stable) -> bool:
    """Return whether a database has been up for the duration of a lease: before, holders may have failed to renew.

    `answered` returns whether it has answered the caller during all of that time.
    """
    if connection.dialect.name == "sqlite":
        return True
    return answered() and bool(connection.scalar(text(_UP_MS)) > ttl_ms)


def require_live(connection: Connection, device: str, fence: int, now_ms: int) -> None:
    """Raise LeaseLostError unless the lease of `device` with `fence` lives; keeps it until the transaction ends."""
    row = connection.execute(_LIVE, {"of": device_key(device)}).first()
    if row is None or row.fence != fence or not row.token:
        now_of = f"; it is {row.user_name}'s now" if row is not None and row.token and row.expires_ms > now_ms else ""
        raise LeaseLostError(f"{device}: the lease {fence} is over{now_of}: its results are not recorded")
    if row.expires_ms <= now_ms:
        late_s = (now_ms - row.expires_ms) / 1000
        raise LeaseLostError(f"{device}: the lease {fence} expired {late_s:.1f} s ago: renew it, or ask anew")


def device_key(device: str) -> str:
    """Return the id of a device in the form of its column."""
    return values.clean(device, values.NAME_LIMIT)


def encode_devices(devices: Iterable[str]) -> str:
    """Return ids in the form of a waiter's column."""
    return msgspec.json.encode([device_key(device) for device in devices]).decode()


@functools.lru_cache(maxsize=256)
def decode_devices(devices: str) -> tuple[str, ...]:
    """Return the ids in a waiter's column."""
    return msgspec.json.decode(devices, type=tuple[str, ...])


def lease_of(row: Row[Any]) -> Lease:
    """Return the lease of a row with `LEASE_COLUMNS`, and perhaps others."""
    return msgspec.convert(row, Lease, from_attributes=True)


def leases_now(connection: Connection, now_ms: int, also: Iterable[str] | None = None) -> list[Lease]:
    """Return leases (expired ones included) and reservations, by device.

    With `also`, ids of devices, only leases of these devices and of devices without an agent.
    """
    query, of = (_LEASES, {}) if also is None else (_LEASES_BESIDE_AGENTS, {"also": list(also)})
    return [lease_of(row) for row in connection.execute(query, {"now_ms": now_ms, **of})]


def is_lease(lease: Lease) -> ColumnElement[bool]:
    """Return the condition that a row is this lease, and was not released."""
    row = schema.lease.c
    return (row.device == lease.device) & (row.fence == lease.fence) & (row.token != "")


def find_waiter(connection: Connection, token: str) -> Row[Any]:
    """Return the row of a request. Raises LeaseLostError."""
    row = connection.execute(_WAITER, {"token": token}).first()
    if row is None:
        raise LeaseLostError("this request for devices was removed from the store: run the command again")
    return row


def waiting_now(connection: Connection, now_ms: int) -> dict[str, Waiting]:
    """Return the living waiting processes, by token: the most urgent first, then the longest wait.

    Unreadable requests are left out; their process gets the reason with its next poll.
    """
    waiting = {}
    for found in connection.execute(_WAITING, {"now_ms": now_ms}):
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            facts = {**found._mapping, "devices": decode_devices(found.devices)}  # noqa: SLF001 - public in SQLAlchemy
            waiting[found.id] = msgspec.convert(facts, Waiting)
    return waiting


def requests_of(waiting: Mapping[str, Waiting]) -> list[Request]:
    """Return the requests of waiting processes, for the policy."""
    return [
        Request(token, one.devices, one.count, one.user, one.priority, one.since_ms) for token, one in waiting.items()
    ]


def requests_now(connection: Connection, now_ms: int) -> list[Request]:
    """Return the requests of the living waiting processes."""
    return requests_of(waiting_now(connection, now_ms))


def may_be_free(connection: Connection, waiter: Row[Any], now_ms: int) -> bool:
    """Return whether a waiter may get a device now, counting only the waiters that precede it."""
    taken = connection.scalars(_TAKEN, {"now_ms": now_ms})
    free = len(set(decode_devices(waiter.devices)).difference(taken))
    if waiter.wanted <= 0 or not free:
        return False
    ahead = connection.scalar(_AHEAD, {**waiter._mapping, "now_ms": now_ms}) or 0  # noqa: SLF001 - public in SQLAlchemy
    return bool(ahead < free)


def marked_of(connection: Connection, leases: Iterable[Lease]) -> set[str]:
    """Return the devices of `leases` that a decision on a shared farm has marked as wanted."""
    return set(connection.scalars(_MARKED, {"devices": sorted(lease.device for lease in leases)}))


def still_ours(
    connection: Connection, leases: Sequence[Lease], *, owned: bool = False
) -> tuple[tuple[Lease, ...], tuple[Lease, ...]]:
    """Return the leases that are still held, in their present state, and the lost ones; `owned` locks their rows."""
    row = schema.lease.c
    query = select(*LEASE_COLUMNS).where(row.device.in_([lease.device for lease in leases]), row.token != "")
    if owned:
        query = query.order_by(row.device).with_for_update()
    now = {(lease.device, lease.fence): lease for lease in map(lease_of, connection.execute(query))}
    kept = tuple(now[key] for lease in leases if (key := (lease.device, lease.fence)) in now)
    return kept, tuple(lease for lease in leases if (lease.device, lease.fence) not in now)


def lease_row(connection: Connection, device: str) -> Lease:
    """Return the row of a device, created if missing, and lock it until the transaction ends."""
    row = connection.execute(_OWN, {"of": device}).first()
    if row is None:
        insert_free(connection, [device])
        row = connection.execute(_OWN, {"of": device}).one()
    return lease_of(row)


def insert_free(connection: Connection, devices: Iterable[str]) -> None:
    """Insert the missing rows of devices: a lease locks the row of its device."""
    texts = dict.fromkeys(("token", "user_name", "host", "purpose", "reserved_for"), "")
    numbers = dict.fromkeys(("fence", "pid", "priority", "acquired_ms", "expires_ms", "reserved_until_ms"), 0)
    insert_missing(connection, schema.lease, [{"device": device, **texts, **numbers} for device in devices])


def take(
    connection: Connection,
    before: Lease,
    wish: Row[Any],
    place: Row[Any],
    *,
    fence: int,
    token: str,
    now_ms: int,
    ttl_ms: int,
) -> Lease:
    """Give a device to a holder, and return its lease.

    `wish` has user, purpose and priority of the holder, `place` its host and process.
    """
    taken = msgspec.structs.replace(
        before,
        fence=fence,
        token=token,
        user=wish.user_name,
        host=place.host,
        pid=place.pid,
        purpose=wish.purpose,
        priority=Priority(wish.priority),
        acquired_ms=now_ms,
        expires_ms=now_ms + ttl_ms,
    )
    connection.execute(_TAKE, {**msgspec.structs.asdict(taken), "priority": int(taken.priority)})
    return taken
