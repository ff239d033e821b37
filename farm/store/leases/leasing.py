"""Leases as rows: processes wait for devices, lease them, renew their leases and release them.

`farm.policy.sharing` decides about the same situation as for shards. A waiter without a device costs no write: the
decision is made without a lock, and again under the lock of the SoC before a device is taken.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, Row, select, update

from farm.base.errors import LeaseLostError
from farm.policy.sharing import hand_over, share_out
from farm.policy.situation import Lease, Priority, Request, Waiting
from farm.policy.waits import BEGINS, NO_DEVICE, why_waiting
from farm.store import schema, values
from farm.store.clock import Answers, Clock, clock_ms
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import read_situation
from farm.store.statements import Group

if TYPE_CHECKING:
    from farm.store.database import Database


def socs_of(connection: Connection, devices: Iterable[str]) -> list[str]:
    """Return the SoCs of devices, sorted: the order in which their locks are taken; empty for an unknown device."""
    found = dict.fromkeys(devices, "")
    state, of_agent = schema.device_state.c, schema.agent_device.c
    for key, soc in ((state.id, state.soc), (of_agent.device, of_agent.soc)):
        found.update((row[0], row[1]) for row in connection.execute(select(key, soc).where(key.in_(list(found)))))
    return sorted(set(found.values()))


def granted_to(connection: Connection, waiter: Row[Any], now_ms: int) -> list[str]:
    """Return the devices that a waiter with a live request may have now."""
    # Hundreds may wait: read the situation only if a device may be left for this waiter.
    if not lease_rows.may_be_free(connection, waiter, now_ms):
        return []
    given: list[str] = []
    requests = lease_rows.requests_now(connection, now_ms)
    for soc in socs_of(connection, lease_rows.decode_devices(waiter.devices)):
        shares = share_out(
            read_situation(connection, soc, now_ms, requests, only_free=True, skips_unreadable=True).situation
        )
        given += [device for device, share in sorted(shares.items()) if share.request == waiter.id]
    return given[: waiter.wanted]


def wanted_of(connection: Connection, kept: Sequence[Lease], now_ms: int) -> frozenset[str]:
    """Return the devices of `kept` that should be handed over."""
    if not kept:
        return frozenset()
    ours = {lease.device for lease in kept}
    # Agents that claim devices for submitted runs have marked the devices to hand over.
    wanted = lease_rows.marked_of(connection, kept)
    if requests := lease_rows.requests_now(connection, now_ms):
        for soc in socs_of(connection, ours):
            known = read_situation(connection, soc, now_ms, requests, skips_unreadable=True)
            wanted |= ours & hand_over(known.situation).keys()
    return frozenset(wanted)


def reasons_of(
    connection: Connection, tokens: Collection[str], requests: Sequence[Request], now_ms: int
) -> Mapping[str, str]:
    """Return the reasons why the requests of `tokens` wait, by token; a request without a usable device has no entry.

    `requests` are all requests.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for soc in socs_of(connection, {device for one in requests if one.id in tokens for device in one.devices}):
        known = read_situation(connection, soc, now_ms, requests, skips_unreadable=True)
        for token, why in why_waiting(known.situation).items():
            found.setdefault(token, []).append((soc, why))
    return {token: _joined(found[token]) for token in tokens if token in found}


def _joined(reasons: Sequence[tuple[str, str]]) -> str:
    """Return the reasons of several SoCs as one text; a SoC with a free device outweighs all others."""
    texts = list(dict.fromkeys(why for _, why in reasons))
    if BEGINS in texts:
        return BEGINS
    return texts[0] if len(texts) == 1 else "; ".join(f"{soc}: {why}" for soc, why in reasons)


# A dead waiter counts for a shorter time than a dead holder. A process polls every 0.25 s, but a busy machine may delay
# it for seconds.
_WAITER_PART, _LEAST_WAITER_S = 0.2, 6.0
# A process that was stopped for less than this time keeps its place.
_FORGOTTEN_MS = 24 * 3600 * 1000


class Renewal(msgspec.Struct, frozen=True):
    """Result of a renewal of leases."""

    kept: tuple[Lease, ...]
    """Renewed leases in their present state."""
    lost: tuple[Lease, ...]
    """Lost leases: stop using their devices at once."""
    wanted: frozenset[str]
    """Ids of devices that others wait for: release them after the running job."""


class Leases(Group):
    """Leases of a store; times are on the database's clock. Every method is one transaction; raises StoreError.

    Device and fence identify a lease: methods leave leases alone that were released, ended or taken over.
    """

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        super().__init__(database, clock)
        self._answers = Answers()

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
            connection.execute(lease_rows.FORGET, {"long_ago_ms": now_ms - _FORGOTTEN_MS})
            row = {
                "id": token,
                "devices": lease_rows.encode_devices(devices),
                "wanted": count,
                "user_name": values.clean(user, values.NAME_LIMIT),
                "host": values.clean(host, values.NAME_LIMIT),
                "pid": pid,
                "purpose": values.clean(purpose),
                "priority": int(priority),
                "since_ms": now_ms,
                "expires_ms": now_ms + _waiter_ms(ttl_s),
            }
            connection.execute(lease_rows.BEGIN, row)
            lease_rows.wake_agents(connection, devices)
            return token

        return self._database.write(insert)

    def require(self, device: str, fence: int) -> None:
        """Raise LeaseLostError unless the lease of `device` with `fence` lives, as a record under that fence does."""
        self._database.write(lambda one: lease_rows.require_live(one, device, fence, self._clock(one)))

    def poll(
        self, token: str, *, ttl_s: float, devices: Sequence[str] | None = None, count: int | None = None
    ) -> tuple[Lease, ...]:
        """Return the new leases that a waiting process gets now, each for `ttl_s`, and keep its place.

        `devices` and `count` replace the request's own; each new lease reduces the count by one. Call it about every
        0.25 s: a request without a poll for a fifth of `ttl_s`, at least 6 s, does not count until the next poll.
        Raises LeaseLostError for a withdrawn request.
        """
        wishes: dict[str, Any] = {}
        if devices is not None:
            wishes["devices"] = lease_rows.encode_devices(devices)
        if count is not None:
            wishes["wanted"] = count
        with self._database.reading() as connection:
            waiter, now_ms = lease_rows.find_waiter(connection, token), self._clock(connection)
            changes = any(waiter._mapping[name] != wish for name, wish in wishes.items())  # noqa: SLF001 - public in SQLAlchemy
            # A changed or expired request must be written first: decisions read requests from the store.
            uncounted = changes or waiter.expires_ms <= now_ms
            given = [] if uncounted else granted_to(connection, waiter, now_ms)
        self._answers.note(ttl_s)
        if uncounted or (not given and waiter.expires_ms - now_ms <= _waiter_ms(ttl_s) // 2):
            self._database.write(lambda connection: self._keep_place(connection, token, wishes, ttl_s))
        if uncounted:
            with self._database.reading() as connection:
                waiter = lease_rows.find_waiter(connection, token)
                given = granted_to(connection, waiter, self._clock(connection))
        return self._database.write(lambda connection: self._take(connection, token, ttl_s)) if given else ()

    def withdraw(self, token: str) -> None:
        """Remove a request; its leases stay."""
        self._database.write(lambda connection: connection.execute(lease_rows.WITHDRAW, {"of": token}))

    def renew(self, leases: Iterable[Lease], *, ttl_s: float, heartbeat_s: float) -> Renewal:
        """Renew leases for `ttl_s`, and return the kept ones, the lost ones and the devices that others wait for.

        Call it after every job and about twice a second: it writes once in `heartbeat_s`. An expired lease is renewed
        unless another process took the device.
        """
        ours = tuple(leases)
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            kept, lost = lease_rows.still_ours(connection, ours)
            wanted = wanted_of(connection, kept, now_ms)
        if all(lease.expires_ms - now_ms > _ms(ttl_s - heartbeat_s) for lease in kept):
            return Renewal(kept, lost, wanted)

        def keep(connection: Connection) -> Renewal:
            kept, lost = lease_rows.still_ours(connection, ours, owned=True)
            expires_ms = self._clock(connection) + _ms(ttl_s)
            for lease in kept:
                connection.execute(update(schema.lease).where(lease_rows.is_lease(lease)).values(expires_ms=expires_ms))
            kept = tuple(msgspec.structs.replace(lease, expires_ms=expires_ms) for lease in kept)
            return Renewal(kept, lost, wanted & {lease.device for lease in kept})

        return self._database.write(keep)

    def release(self, leases: Iterable[Lease]) -> None:
        """Release leases; holders in other processes find them lost."""
        ours = sorted(leases, key=lambda lease: lease.device)

        def give_back(connection: Connection) -> None:
            for lease in ours:
                connection.execute(lease_rows.GIVE_BACK, {"of": lease.device, "was": lease.fence})
            lease_rows.wake_agents(connection, [lease.device for lease in ours])

        self._database.write(give_back)

    def reserve(self, device: str, user: str, seconds: float, from_ms: int = 0) -> Lease:
        """Reserve a device for processes of `user`, for `seconds` from now; a further call changes the time.

        With `from_ms` the reservation begins then: others may use the device until then. A device has one reservation.
        Raises LeaseLostError if another user has leased or reserved the device.
        """
        device, user = lease_rows.device_key(device), values.clean(user, values.NAME_LIMIT)

        def change(connection: Connection) -> Lease:
            now_ms = self._clock(connection)
            lease = lease_rows.lease_row(connection, device)
            reserved_by = lease.reserved_for if lease.reserved_until_ms > now_ms else ""
            other = reserved_by or (lease.user if lease.is_held(now_ms) and from_ms <= now_ms else user)
            if other != user:
                raise LeaseLostError(f"{device} is {other}'s: it cannot be reserved for {user} now")
            reserved: dict[str, Any] = {"reserved_for": user, "reserved_from_ms": from_ms if from_ms > now_ms else 0}
            reserved["reserved_until_ms"] = max(now_ms, from_ms) + _ms(seconds)
            if not lease.is_held(now_ms):
                # A holder that continues after a long stop must find its expired lease lost.
                reserved |= {"token": "", "expires_ms": 0}
            changed = update(schema.lease).where(schema.lease.c.device == device).values(reserved)
            return lease_rows.lease_of(connection.execute(changed.returning(*lease_rows.LEASE_COLUMNS)).one())

        return self._database.write(change)

    def cancel(self, device: str, user: str) -> bool:
        """End the reservation of a device for `user`, and return whether there was one; leases stay."""
        row = schema.lease.c
        key, user = lease_rows.device_key(device), values.clean(user, values.NAME_LIMIT)
        ours = (row.device == key) & (row.reserved_for == user)

        def change(connection: Connection) -> bool:
            live = ours & (row.reserved_until_ms > self._clock(connection))
            over = update(schema.lease).where(live).values(reserved_for="", reserved_until_ms=0, reserved_from_ms=0)
            return connection.execute(over).rowcount > 0

        return self._database.write(change)

    def all(self) -> list[Lease]:
        """Return the live leases and reservations, sorted by device; a mere reservation has an empty `token`."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            found = []
            for lease in lease_rows.leases_now(connection, now_ms):
                held, reserved_by = lease.is_held(now_ms), lease.reserved_by(now_ms)
                if not held and not reserved_by:
                    continue
                over: dict[str, Any] = {} if held else {"token": "", "user": "", "purpose": ""}
                over |= {} if reserved_by else {"reserved_for": "", "reserved_until_ms": 0, "reserved_from_ms": 0}
                found.append(msgspec.structs.replace(lease, **over))
            return found

    def upcoming(self) -> list[Lease]:
        """Return the reservations that begin later, by their start."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            found = [one for one in lease_rows.leases_now(connection, now_ms) if one.reserved_from_ms > now_ms]
        return sorted(found, key=lambda one: (one.reserved_from_ms, one.device))

    def waiting(self) -> list[Waiting]:
        """Return the processes that wait for devices, each with its reason; the most urgent first, then the longest."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            waiting = lease_rows.waiting_now(connection, now_ms)
            why = reasons_of(connection, waiting.keys(), lease_rows.requests_of(waiting), now_ms)
        return [msgspec.structs.replace(one, why=why.get(token, NO_DEVICE)) for token, one in waiting.items()]

    def why(self, token: str) -> str:
        """Return why a request waits."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            requests = lease_rows.requests_now(connection, now_ms)
            return reasons_of(connection, [token], requests, now_ms).get(token, NO_DEVICE)

    def now_ms(self) -> int:
        """Return the time on the database's clock; epoch, milliseconds."""
        with self._database.reading() as connection:
            return self._clock(connection)

    def _keep_place(self, connection: Connection, token: str, wishes: dict[str, Any], ttl_s: float) -> None:
        alive = {"of": token, "alive_ms": self._clock(connection) + _waiter_ms(ttl_s)}
        connection.execute(lease_rows.KEEP_PLACE.values(wishes) if wishes else lease_rows.KEEP_PLACE, alive)

    def _take(self, connection: Connection, token: str, ttl_s: float) -> tuple[Lease, ...]:
        """Lease the devices that a waiter gets, by a decision under the locks of their SoCs."""
        waiter = lease_rows.find_waiter(connection, token)
        for soc in socs_of(connection, lease_rows.decode_devices(waiter.devices)):
            lease_rows.lock_soc(connection, soc)
        # The wait for the locks may have outlasted the request: renew it.
        self._keep_place(connection, token, {}, ttl_s)
        now_ms = self._clock(connection)
        settled = partial(self._answers.is_stable, ttl_s)
        taken: list[Lease] = []
        for device in granted_to(connection, waiter, now_ms):
            before = lease_rows.lease_row(connection, device)
            # While the database was away holders could not renew: their leases are not lost yet.
            if before.token and not lease_rows.is_stable(connection, _ms(ttl_s), settled):
                continue
            if not before.is_held(now_ms) and before.reserved_by(now_ms) in ("", waiter.user_name):
                holder: dict[str, Any] = {"fence": before.fence + 1, "token": token, "ttl_ms": _ms(ttl_s)}
                taken.append(lease_rows.take(connection, before, waiter, waiter, now_ms=now_ms, **holder))
        served = {"of": token, "alive_ms": now_ms + _waiter_ms(ttl_s), "left": waiter.wanted - len(taken)}
        connection.execute(lease_rows.SERVED, served)
        return tuple(taken)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _waiter_ms(ttl_s: float) -> int:
    return _ms(min(ttl_s, max(_WAITER_PART * ttl_s, _LEAST_WAITER_S)))
