"""Leases as rows: processes that wait for devices, get them, keep them alive and give them back.

Who gets what is `farm.leases`' decision about what the rows say now. It is made without a lock, and carried out in a
transaction that no other can overlap, as far as it still can be: so nobody is kept from writing for long, and a process
that waits or holds writes when it gets something and a few times in its time to live. Looking costs no write.
"""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import ColumnElement, bindparam, delete, func, or_, select, text, update

from farm.errors import LeaseLostError
from farm.leases import Lease, Priority, Request, grant, to_yield
from farm.store import schema, values
from farm.store.clock import clock_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from sqlalchemy import Connection, Row

    from farm.store.clock import Clock
    from farm.store.database import Database

# Any number, as long as every farm takes the same one, and not the one of migrations.
_LEASE_LOCK = 0x6C656173
# Processes that wait look often. One that died is not waited for as long as one that has a device.
_WAITER_TTL_MS = 6_000
# A process that was stopped for less finds its request where it was.
_FORGOTTEN_MS = 24 * 3600 * 1000

_TAKEN_COLUMNS = ("fence", "token", "user_name", "host", "pid", "purpose", "priority", "acquired_ms", "expires_ms")

# Made once: processes that wait ask them three times a second.
_lease_row, _waiter_row, _state_row = schema.lease.c, schema.waiter.c, schema.device_state.c
_LEASES = (
    select(schema.lease)
    .where(
        ((_lease_row.token != "") & (_lease_row.expires_ms > bindparam("now_ms")))
        | (_lease_row.reserved_until_ms > bindparam("now_ms"))
    )
    .order_by(_lease_row.device)
)
_TAKEN = select(_lease_row.device).where(_lease_row.token != "", _lease_row.expires_ms > bindparam("now_ms"))
_WAITER = select(schema.waiter).where(_waiter_row.id == bindparam("token"))
_WAITING = select(
    _waiter_row.id,
    _waiter_row.devices,
    _waiter_row.wanted,
    _waiter_row.user_name,
    _waiter_row.priority,
    _waiter_row.since_ms,
).where(_waiter_row.expires_ms > bindparam("now_ms"), _waiter_row.wanted > 0)
_LEASE = select(schema.lease).where(_lease_row.device == bindparam("of"))
_TAKE = (
    update(schema.lease)
    .where(_lease_row.device == bindparam("of"))
    .values({name: bindparam(f"new_{name}") for name in _TAKEN_COLUMNS})
)
_GIVE_BACK = (
    update(schema.lease)
    .where(_lease_row.device == bindparam("of"), _lease_row.fence == bindparam("was"), _lease_row.token != "")
    .values(token="", expires_ms=0)
)
_KEEP_PLACE = update(schema.waiter).where(_waiter_row.id == bindparam("of")).values(expires_ms=bindparam("alive_ms"))
_SERVED = _KEEP_PLACE.values(wanted=bindparam("left"))
_WITHDRAW = delete(schema.waiter).where(_waiter_row.id == bindparam("of"))
_FORGET = delete(schema.waiter).where(_waiter_row.expires_ms < bindparam("long_ago_ms"))
_BEGIN = schema.waiter.insert()
# Who goes before me whatever the others have: the more urgent and the older of my own user, for the same devices.
_AHEAD = select(func.sum(_waiter_row.wanted)).where(
    _waiter_row.expires_ms > bindparam("now_ms"),
    _waiter_row.wanted > 0,
    _waiter_row.devices == bindparam("devices"),
    _waiter_row.user_name == bindparam("user_name"),
    (_waiter_row.priority > bindparam("priority"))
    | ((_waiter_row.priority == bindparam("priority")) & (_waiter_row.since_ms < bindparam("since_ms"))),
)
_UNUSABLE = select(_state_row.id).where(or_(_state_row.in_service.is_(False), _state_row.health == "quarantined"))


class Renewal(msgspec.Struct, frozen=True):
    """What became of leases."""

    kept: tuple[Lease, ...]
    """As they are now."""
    lost: tuple[Lease, ...]
    """Not ours any more: stop using the device at once."""
    wanted: frozenset[str]
    """Ids of devices that others wait for: release them after the running job."""


class Leases:
    """The leases of a store; times are on the database's clock. Every method is one transaction; raises StoreError.

    A lease is its device and fence: one that was released, ended or taken over is left alone by everything here.
    """

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        self._database, self._clock = database, clock

    def request(
        self,
        devices: Sequence[str],
        *,
        count: int,
        user: str,
        host: str,
        pid: int,
        purpose: str,
        priority: Priority,
        ttl_s: float,
    ) -> str:
        """Begin to wait for `count` of `devices` (ids, best first), and return the token to poll with."""
        token = secrets.token_hex(16)

        def insert(connection: Connection) -> str:
            now_ms = self._clock(connection)
            connection.execute(_FORGET, {"long_ago_ms": now_ms - _FORGOTTEN_MS})
            row = {
                "id": token,
                "devices": _encode(devices),
                "wanted": count,
                "user_name": values.clean(user, values.NAME_LIMIT),
                "host": values.clean(host, values.NAME_LIMIT),
                "pid": pid,
                "purpose": values.clean(purpose),
                "priority": int(priority),
                "since_ms": now_ms,
                "expires_ms": now_ms + _waiter_ms(ttl_s),
            }
            connection.execute(_BEGIN, row)
            return token

        return self._database.write(insert)

    def poll(
        self, token: str, *, ttl_s: float, devices: Sequence[str] | None = None, count: int | None = None
    ) -> tuple[Lease, ...]:
        """Return the new leases that a waiting process gets now, each for `ttl_s`, and keep its place.

        `devices` and `count` replace what it waits for; each lease that it gets makes the count one less. Call it
        every 0.3 s or so: who is not heard of for 6 s, or `ttl_s` when that is less, does not count until it is.
        Raises LeaseLostError when the request was withdrawn.
        """
        wishes: dict[str, Any] = {}
        if devices is not None:
            wishes["devices"] = _encode(devices)
        if count is not None:
            wishes["wanted"] = count
        with self._database.reading() as connection:
            waiter, now_ms = _waiter(connection, token), self._clock(connection)
            changes = any(waiter._mapping[name] != wish for name, wish in wishes.items())  # noqa: SLF001 - public in SQLAlchemy
            # One that is not counted has to be before anybody can tell what it gets.
            uncounted = changes or waiter.expires_ms <= now_ms
            given = [] if uncounted else _granted(connection, waiter, now_ms)
        if uncounted or (not given and waiter.expires_ms - now_ms <= _waiter_ms(ttl_s) // 2):
            self._database.write(lambda connection: self._keep_place(connection, token, wishes, ttl_s))
        if uncounted:
            with self._database.reading() as connection:
                given = _granted(connection, _waiter(connection, token), self._clock(connection))
        return self._database.write(lambda connection: self._take(connection, token, given, ttl_s)) if given else ()

    def withdraw(self, token: str) -> None:
        """Stop waiting; what was leased stays leased."""
        self._database.write(lambda connection: connection.execute(_WITHDRAW, {"of": token}))

    def renew(self, leases: Iterable[Lease], *, ttl_s: float) -> Renewal:
        """Keep leases alive for `ttl_s`, and learn which are lost and which are wanted by others.

        Call it after every job and twice a second or so; a lease that expired and that nobody took is renewed.
        """
        ours = tuple(leases)
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            kept, lost = _still_ours(connection, ours)
            wanted = _wanted(connection, kept, now_ms)
        if all(lease.expires_ms - now_ms > _ms(ttl_s) * 2 // 3 for lease in kept):
            return Renewal(kept, lost, wanted)

        def keep(connection: Connection) -> Renewal:
            lock(connection)
            kept, lost = _still_ours(connection, ours)
            expires_ms = self._clock(connection) + _ms(ttl_s)
            for lease in kept:
                connection.execute(update(schema.lease).where(_is(lease)).values(expires_ms=expires_ms))
            kept = tuple(msgspec.structs.replace(lease, expires_ms=expires_ms) for lease in kept)
            return Renewal(kept, lost, wanted & {lease.device for lease in kept})

        return self._database.write(keep)

    def release(self, leases: Iterable[Lease]) -> None:
        """Give devices back; or, of somebody else, end leases, whose holders find them lost."""
        ours = sorted(leases, key=lambda lease: lease.device)

        def give_back(connection: Connection) -> None:
            lock(connection)
            for lease in ours:
                connection.execute(_GIVE_BACK, {"of": lease.device, "was": lease.fence})

        self._database.write(give_back)

    def reserve(self, device: str, user: str, seconds: float) -> Lease:
        """Let only processes of `user` lease a device for `seconds`, from now; again, to make it longer or shorter.

        Raises LeaseLostError when another user has leased or reserved it.
        """
        device, user = _key(device), values.clean(user, values.NAME_LIMIT)

        def change(connection: Connection) -> Lease:
            lock(connection)
            now_ms = self._clock(connection)
            lease = _row_of(connection, device)
            other = lease.reserved_by(now_ms) or (lease.user if lease.is_held(now_ms) else user)
            if other != user:
                raise LeaseLostError(f"{device} is {other}'s: it cannot be reserved for {user} now")
            reserved: dict[str, Any] = {"reserved_for": user, "reserved_until_ms": now_ms + _ms(seconds)}
            if not lease.is_held(now_ms):
                # A holder that comes back from a long stop finds it lost.
                reserved |= {"token": "", "expires_ms": 0}
            changed = update(schema.lease).where(schema.lease.c.device == device).values(reserved)
            return _lease(connection.execute(changed.returning(*schema.lease.c)).one())

        return self._database.write(change)

    def cancel(self, device: str, user: str) -> bool:
        """End the reservation of a device for `user`, and tell whether there was one; leases are not touched."""
        row = schema.lease.c
        ours = (row.device == _key(device)) & (row.reserved_for == values.clean(user, values.NAME_LIMIT))

        def change(connection: Connection) -> bool:
            lock(connection)
            live = ours & (row.reserved_until_ms > self._clock(connection))
            over = update(schema.lease).where(live).values(reserved_for="", reserved_until_ms=0)
            return connection.execute(over).rowcount > 0

        return self._database.write(change)

    def all(self) -> list[Lease]:
        """Return what is held or reserved now, by device; the `token` of one that is only reserved is empty."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            found = []
            for lease in _leases(connection, now_ms):
                held, reserved_by = lease.is_held(now_ms), lease.reserved_by(now_ms)
                over: dict[str, Any] = {} if held else {"token": "", "user": "", "purpose": ""}
                over |= {} if reserved_by else {"reserved_for": "", "reserved_until_ms": 0}
                found.append(msgspec.structs.replace(lease, **over))
            return found

    def now_ms(self) -> int:
        """Return the time on the database's clock; epoch, milliseconds."""
        with self._database.reading() as connection:
            return self._clock(connection)

    def _keep_place(self, connection: Connection, token: str, wishes: dict[str, Any], ttl_s: float) -> None:
        alive = {"of": token, "alive_ms": self._clock(connection) + _waiter_ms(ttl_s)}
        connection.execute(_KEEP_PLACE.values(wishes) if wishes else _KEEP_PLACE, alive)

    def _take(self, connection: Connection, token: str, devices: Iterable[str], ttl_s: float) -> tuple[Lease, ...]:
        """Lease those of `devices` that are still to be had; who gets what was decided without a lock."""
        lock(connection)
        now_ms = self._clock(connection)
        waiter = _waiter(connection, token)
        taken = []
        for device in list(devices)[: waiter.wanted]:
            before = _row_of(connection, device)
            if not before.is_held(now_ms) and before.reserved_by(now_ms) in ("", waiter.user_name):
                taken.append(_take(connection, waiter, before, now_ms, _ms(ttl_s)))
        served = {"of": token, "alive_ms": now_ms + _waiter_ms(ttl_s), "left": waiter.wanted - len(taken)}
        connection.execute(_SERVED, served)
        return tuple(taken)


def lock(connection: Connection) -> None:
    """Keep every other decision about leases waiting until the transaction ends."""
    # SQLite has one writer at a time. PostgreSQL could lock rows, but a decision looks at all of them.
    if connection.dialect.name != "sqlite":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LEASE_LOCK})


def require_live(connection: Connection, device: str, fence: int, now_ms: int) -> None:
    """Raise LeaseLostError unless the lease of `device` with `fence` lives; it does then until the transaction ends."""
    query = select(schema.lease).where(schema.lease.c.device == _key(device))
    # SQLite has no such clause, nor needs it in a transaction that writes.
    row = connection.execute(query.with_for_update(read=True)).first()
    if row is None or row.fence != fence or not row.token:
        now_of = f"; it is {row.user_name}'s now" if row is not None and row.token and row.expires_ms > now_ms else ""
        raise LeaseLostError(f"{device}: the lease {fence} is over{now_of}: what it gave is not recorded")
    if row.expires_ms <= now_ms:
        late_s = (now_ms - row.expires_ms) / 1000
        raise LeaseLostError(f"{device}: the lease {fence} expired {late_s:.1f} s ago: renew it, or ask anew")


def _key(device: str) -> str:
    return values.clean(device, values.NAME_LIMIT)


def _encode(devices: Iterable[str]) -> str:
    return msgspec.json.encode([_key(device) for device in devices]).decode()


@functools.lru_cache(maxsize=256)
def _decode(devices: str) -> tuple[str, ...]:
    return msgspec.json.decode(devices, type=tuple[str, ...])


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _waiter_ms(ttl_s: float) -> int:
    return min(_ms(ttl_s), _WAITER_TTL_MS)


def _lease(row: Row[Any]) -> Lease:
    facts = dict(row._mapping)  # noqa: SLF001 - public in SQLAlchemy
    return Lease(user=facts.pop("user_name"), priority=Priority(facts.pop("priority")), **facts)


def _leases(connection: Connection, now_ms: int) -> list[Lease]:
    """Return what is held or reserved."""
    return [_lease(row) for row in connection.execute(_LEASES, {"now_ms": now_ms})]


def _is(lease: Lease) -> ColumnElement[bool]:
    row = schema.lease.c
    return (row.device == lease.device) & (row.fence == lease.fence) & (row.token != "")


def _waiter(connection: Connection, token: str) -> Row[Any]:
    row = connection.execute(_WAITER, {"token": token}).first()
    if row is None:
        raise LeaseLostError("this request for devices is not in the store any more: ask anew")
    return row


def _requests(connection: Connection, now_ms: int) -> list[Request]:
    """Return what is waited for by processes that are alive."""
    return [
        Request(token, _decode(devices), wanted, user, Priority(priority), since_ms)
        for token, devices, wanted, user, priority, since_ms in connection.execute(_WAITING, {"now_ms": now_ms})
    ]


def _usable(connection: Connection, requests: Iterable[Request]) -> Collection[str]:
    return set().union(*{request.devices for request in requests}).difference(connection.scalars(_UNUSABLE))


def _decide(connection: Connection, now_ms: int, decision: Callable[..., Any]) -> Any:
    requests = _requests(connection, now_ms)
    if not requests:
        return ()
    return decision(requests, _usable(connection, requests), _leases(connection, now_ms), now_ms)


def _granted(connection: Connection, waiter: Row[Any], now_ms: int) -> list[str]:
    # The others that wait are many, and only matter when there is something to share that those before leave.
    taken = connection.scalars(_TAKEN, {"now_ms": now_ms})
    free = len(set(_decode(waiter.devices)).difference(taken))
    if waiter.wanted <= 0 or not free:
        return []
    ahead = connection.scalar(_AHEAD, {**waiter._mapping, "now_ms": now_ms}) or 0  # noqa: SLF001 - public in SQLAlchemy
    if ahead >= free:
        return []
    return [given.device for given in _decide(connection, now_ms, grant) if given.request == waiter.id]


def _wanted(connection: Connection, kept: Iterable[Lease], now_ms: int) -> frozenset[str]:
    return frozenset(_decide(connection, now_ms, to_yield)) & {lease.device for lease in kept}


def _still_ours(connection: Connection, leases: Sequence[Lease]) -> tuple[tuple[Lease, ...], tuple[Lease, ...]]:
    """Return those that are ours, as they are now, and those that are not."""
    row = schema.lease.c
    query = select(schema.lease).where(row.device.in_([lease.device for lease in leases]), row.token != "")
    now = {(lease.device, lease.fence): lease for lease in map(_lease, connection.execute(query))}
    kept = tuple(now[key] for lease in leases if (key := (lease.device, lease.fence)) in now)
    return kept, tuple(lease for lease in leases if (lease.device, lease.fence) not in now)


def _row_of(connection: Connection, device: str) -> Lease:
    """Return the row of a device, which is made when it has none."""
    row = connection.execute(_LEASE, {"of": device}).first()
    if row is None:
        free = {"device": device, "fence": 0, "token": "", "user_name": "", "host": "", "pid": 0, "purpose": ""}
        free |= dict.fromkeys(("priority", "acquired_ms", "expires_ms", "reserved_until_ms"), 0) | {"reserved_for": ""}
        connection.execute(schema.lease.insert(), free)
        row = connection.execute(_LEASE, {"of": device}).one()
    return _lease(row)


def _take(connection: Connection, waiter: Row[Any], before: Lease, now_ms: int, ttl_ms: int) -> Lease:
    taken = msgspec.structs.replace(
        before,
        fence=before.fence + 1,
        token=waiter.id,
        user=waiter.user_name,
        host=waiter.host,
        pid=waiter.pid,
        purpose=waiter.purpose,
        priority=Priority(waiter.priority),
        acquired_ms=now_ms,
        expires_ms=now_ms + ttl_ms,
    )
    facts = {**msgspec.structs.asdict(taken), "user_name": taken.user, "priority": int(taken.priority)}
    connection.execute(_TAKE, {"of": taken.device, **{f"new_{name}": facts[name] for name in _TAKEN_COLUMNS}})
    return taken
