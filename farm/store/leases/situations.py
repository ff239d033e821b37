"""Situation of a SoC for the policy, from rows: the same for shards and for processes that wait.

Quotas belong to it. Devices that their holders have to hand over are decided from it, and marked in the leases.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, Row, TextClause, delete, func, select, text

from farm.base.errors import UnreadableRowError, UsageError
from farm.policy.sharing import hand_over
from farm.policy.situation import (
    LABEL,
    USER,
    Lease,
    LivingDevice,
    OpenOrder,
    Priority,
    Request,
    Retry,
    Share,
    Situation,
)
from farm.store import schema, values
from farm.store.leases import rows as lease_rows
from farm.store.protocol import PROTOCOL

if TYPE_CHECKING:
    from farm.store.clock import Clock
    from farm.store.database import Database

# The decision costs as much as a full distribution, and many claims request it on a busy farm: limit its rate, less for
# new waiters.
_LOOK_MS, _LOOK_FOR_NEWS_MS = 1_000, 100
_NEW_MS = 3_000

_LOOK = text("""
    INSERT INTO soc_look (soc, looked_ms) VALUES (:soc, :now_ms)
    ON CONFLICT (soc) DO UPDATE SET looked_ms = excluded.looked_ms WHERE soc_look.looked_ms <= :now_ms - :look_ms
    RETURNING soc
""")
_NOTIFY = text("SELECT pg_notify('farm', :hint)")
_MARK = text("""
    UPDATE lease SET wanted_by = mark.user_name
    FROM unnest(CAST(:devices AS text[]), CAST(:users AS text[])) AS mark (device, user_name)
    WHERE lease.device = mark.device AND (token <> '' OR mark.user_name = '')
""")


def look_for_wanted(connection: Connection, known: KnownSoc, shares: Mapping[str, Share]) -> None:
    """Mark the devices to hand over, if a decision leaves runs or processes waiting; at most once a second for a SoC.

    With a new waiter, at most ten times a second. `known` is the situation of the decision: the free devices.
    """
    situation = known.situation
    given = Counter(share.run_id or share.request for share in shares.values())
    left = [
        (order.priority, order.user, order.since_ms)
        for order in situation.orders
        if order.ready + len(order.retries) > given[order.run_id]
    ] + [(one.priority, one.user, one.since_ms) for one in situation.requests if one.count > given[one.id]]
    if not may_be_wanted({(priority, user) for priority, user, _ in left}, known.held):
        return
    is_news = max(since_ms for *_, since_ms in left) > situation.now_ms - _NEW_MS
    look_ms = _LOOK_FOR_NEWS_MS if is_news else _LOOK_MS
    asked = {"soc": situation.soc, "now_ms": situation.now_ms, "look_ms": look_ms}
    if connection.scalar(_LOOK, asked) is not None:
        known = read_situation(connection, situation.soc, situation.now_ms, situation.requests)
        mark_wanted(connection, known)


def may_be_wanted(left: Iterable[tuple[Priority, str]], held: Mapping[tuple[Priority, str], int]) -> bool:
    """Return whether a waiter may have a better right than some holder; pure.

    `left` are the waiters and `held` the holders, by priority and user; `held` with their number of devices.
    """
    has: Counter[str] = Counter()
    for (_, user), count in held.items():
        has[user] += count
    return any(
        lower < priority or (lower == priority and has[holder] >= has[user] + 2)
        for priority, user in left
        for lower, holder in held
    )


def mark_wanted(connection: Connection, known: KnownSoc) -> int:
    """Mark the devices of a SoC that holders have to hand over, and return the number of newly marked ones."""
    wanted = hand_over(known.situation)
    changed = {
        device: wanted.get(device, "")
        for device in sorted(wanted.keys() | known.wanted.keys())
        if known.wanted.get(device, "") != wanted.get(device, "")
    }
    if changed:
        connection.execute(_MARK, {"devices": list(changed), "users": list(changed.values())})
    news = sum(bool(user) and device not in known.wanted for device, user in changed.items())
    if news:
        connection.execute(_NOTIFY, {"hint": f"wanted {known.situation.soc}"})
    return news


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


_DEVICE = """
    SELECT agent_device.device, agent_device.soc, agent_device.kind, agent_device.os, agent_device.serial,
           agent_device.name, CAST(agent_device.labels AS text) AS labels,
           agent_device.refused = '' AND NOT is_draining AND NOT has_left AND agent.expires_ms > :now_ms
               AND coalesce(device_state.in_service AND device_state.health <> 'quarantined', true) AS is_fit,
           lease.fence, lease.token, lease.user_name, lease.host, lease.pid, lease.purpose, lease.priority,
           lease.acquired_ms, lease.expires_ms, lease.reserved_for, lease.reserved_until_ms, lease.reserved_from_ms,
           lease.wanted_by
    FROM agent_device JOIN agent ON agent.name = agent_device.agent JOIN lease ON lease.device = agent_device.device
    LEFT JOIN device_state ON device_state.id = agent_device.device
    WHERE agent_device.soc = :soc
"""
_DEVICES = text(_DEVICE)
_FREE_DEVICES = text(f"""
    SELECT * FROM ({_DEVICE}) AS device
    WHERE is_fit AND (token = '' OR expires_ms <= :now_ms OR device = ANY(:keep))
""")  # noqa: S608 - constants
# Startable shards of each run, up to the number of devices that could begin them.
_READY = text("""
    SELECT run_id, user_name, priority, submitted_ms, CAST(devices AS text) AS devices, CAST(labels AS text) AS labels,
           CAST(classes AS text) AS classes, most_devices, ready, retries, 0 AS lacking,
           CASE WHEN most_devices IS NULL THEN 0 ELSE (
               SELECT count(DISTINCT device) FROM shard
               WHERE shard.run_id = run_order.run_id AND shard.state = 'held' AND soc = :soc
                 AND device <> ALL(:keep)) END AS held
    FROM run_order
    CROSS JOIN LATERAL (
        SELECT count(*) AS ready FROM (
            SELECT 1 FROM shard WHERE soc = :soc AND shard.run_id = run_order.run_id AND NOT retry
              AND shard.state = 'waiting' AND lacking = 0 LIMIT :most) AS first) AS plain
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT 1 FROM shard WHERE soc = :soc AND shard.run_id = run_order.run_id AND retry
            AND shard.state = 'waiting' AND lacking = 0) AS retries) AS again
    WHERE state = 'open' AND (until_ms IS NULL OR until_ms > :now_ms)
      AND (most_failures IS NULL OR failures < most_failures) AND (ready > 0 OR retries) AND protocol = :protocol
""")
_ORDERS = text("""
    SELECT run_order.run_id, user_name, priority, submitted_ms, CAST(devices AS text) AS devices,
           CAST(labels AS text) AS labels, CAST(classes AS text) AS classes, most_devices, ready, held, lacking, retries
    FROM run_order JOIN (
        SELECT run_id, count(*) FILTER (WHERE state = 'waiting' AND lacking = 0 AND NOT retry) AS ready,
               count(DISTINCT device) FILTER (WHERE state = 'held') AS held,
               coalesce(sum(lacking), 0) AS lacking, bool_or(retry AND state = 'waiting' AND lacking = 0) AS retries
        FROM shard WHERE soc = :soc AND state IN ('waiting', 'held') GROUP BY run_id
    ) AS counts ON counts.run_id = run_order.run_id
    WHERE state = 'open' AND (until_ms IS NULL OR until_ms > :now_ms)
      AND (most_failures IS NULL OR failures < most_failures) AND protocol = :protocol
""")
_RETRIES = text("""
    SELECT run_id, id, avoid FROM shard
    WHERE soc = :soc AND state = 'waiting' AND lacking = 0 AND retry AND run_id = ANY(:runs) ORDER BY position, id
""")
_RUNNING = text("SELECT device FROM shard WHERE soc = :soc AND state = 'held'")
# Held devices by user and priority: a waiter of a higher priority has a better right to them.
_HERE = text("""
    SELECT user_name, priority, count(*) AS n FROM lease JOIN agent_device ON agent_device.device = lease.device
    WHERE soc = :soc AND token <> '' AND expires_ms > :now_ms AND lease.device <> ALL(:keep)
    GROUP BY user_name, priority
""")
_lease_row, _agent_row, _state_row = schema.lease.c, schema.agent_device.c, schema.device_state.c
_LABELLED = text("""
    SELECT user_name, label, count(*) AS n
    FROM lease JOIN agent_device ON agent_device.device = lease.device
    CROSS JOIN LATERAL json_array_elements_text(agent_device.labels) AS label
    WHERE token <> '' AND lease.expires_ms > :now_ms AND label = ANY(:labels) AND lease.device <> ALL(:keep)
      AND (:also_here OR agent_device.soc <> :soc)
    GROUP BY user_name, label
""")


class KnownSoc(msgspec.Struct):
    """Situation of a SoC, and facts of its rows beside it."""

    situation: Situation
    leases: dict[str, Lease]
    """Leases of its devices."""
    wanted: dict[str, str] = {}
    """User who waits for each device that an earlier decision hands over."""
    held: dict[tuple[Priority, str], int] = {}
    """Number of further held devices beside `leases`, by priority and user."""


def read_situation(
    connection: Connection, soc: str, now_ms: int, requests: Sequence[Request], *, skips_unreadable: bool = False
) -> KnownSoc:
    """Return the situation of a SoC with all of its devices, waiting runs and waiting processes.

    `requests` come from `requests_now`. `skips_unreadable` leaves out unreadable orders, which otherwise raise
    UnreadableRowError.
    """
    of_soc = {"soc": soc, "now_ms": now_ms}
    rows = _of_agents(connection, _DEVICES, of_soc)
    leases = {row.device: lease_rows.lease_of(row) for row in rows}
    quotas = read_quotas(connection)
    fit = [living_device(row) for row in rows if row.is_fit]
    beside = _Beside(connection, soc, now_ms, requests, {device.id for device in fit})
    known = leases | {lease.device: lease for lease in beside.leases}
    here = Counter(lease.user for lease in known.values() if lease.is_held(now_ms))
    labelled = _labelled(connection, of_soc, quotas, (), also_here=False)
    # A file has no lasting loss of connection: an expired lease is free at once.
    keeps_silent = connection.dialect.name != "sqlite"
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=[*fit, *beside.devices],
        leases=[
            lease
            for lease in known.values()
            if lease.is_held(now_ms) or lease.reserved_by(now_ms) or (keeps_silent and lease.token)
        ],
        orders=_orders(connection, of_soc, _ORDERS, {"protocol": PROTOCOL}, skips_unreadable=skips_unreadable),
        requests=requests,
        quotas=quotas,
        elsewhere=_elsewhere(connection, now_ms, quotas, here, ()),
        elsewhere_labelled=labelled + beside.labelled(quotas),
        running=frozenset(connection.scalars(_RUNNING, {"soc": soc})),
    )
    return KnownSoc(situation, leases, {row.device: row.wanted_by for row in rows if row.wanted_by})


def read_free(
    connection: Connection,
    soc: str,
    now_ms: int,
    requests: Sequence[Request],
    *,
    asking: Collection[str] = (),
    keep: Collection[str] = (),
    skips_unreadable: bool = False,
) -> KnownSoc:
    """Return the situation of a SoC with its free devices alone, which are few on a busy farm.

    Devices in `keep` are free for their holders. `requests` and `skips_unreadable` as in `read_situation`.
    """
    of_soc = {"soc": soc, "now_ms": now_ms, "keep": list(keep)}
    rows = _of_agents(connection, _FREE_DEVICES, of_soc)
    leases = {row.device: lease_rows.lease_of(row) for row in rows}
    held: Counter[tuple[Priority, str]] = Counter()
    here: Counter[str] = Counter()
    for row in _of_agents(connection, _HERE, of_soc):
        held[Priority(row.priority), row.user_name] = row.n
        here[row.user_name] += row.n
    quotas = read_quotas(connection)
    beside = _Beside(connection, soc, now_ms, requests, leases, busy_of_agents=False)
    held.update((lease.priority, lease.user) for lease in beside.leases if lease.is_held(now_ms))
    also_here = Counter(lease.user for lease in beside.leases if lease.is_held(now_ms))
    reserved = [lease for lease in leases.values() if lease.reserved_by(now_ms) and not lease.is_held(now_ms)]
    labelled = _labelled(connection, of_soc, quotas, keep, also_here=True)
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=[*map(living_device, rows), *beside.devices],
        leases=[*reserved, *beside.leases],
        orders=_orders(
            connection, of_soc, _READY, {"most": len(rows) + 1, "protocol": PROTOCOL}, skips_unreadable=skips_unreadable
        ),
        requests=requests,
        quotas=quotas,
        here=here,
        elsewhere=_elsewhere(connection, now_ms, quotas, here + also_here, keep),
        elsewhere_labelled=labelled + beside.labelled(quotas),
        asking=asking,
    )
    return KnownSoc(situation, leases, held=held)


def find_socs(connection: Connection, devices: Iterable[str]) -> dict[str, str]:
    """Return the SoC of each device; empty for an unknown device."""
    ids = list(devices)
    found = dict.fromkeys(ids, "")
    for table in (schema.device_state.c, schema.agent_device.c):
        key = table.id if "id" in table else table.device
        found.update(
            (row.id, row.soc) for row in connection.execute(select(key.label("id"), table.soc).where(key.in_(ids)))
        )
    return found


class _Beside:
    """Devices of a SoC without a living agent, which processes lease themselves."""

    def __init__(
        self,
        connection: Connection,
        soc: str,
        now_ms: int,
        requests: Iterable[Request],
        of_agents: Collection[str],
        *,
        busy_of_agents: bool = True,
    ) -> None:
        """`of_agents` are known already. `busy_of_agents`: with devices that agents hold or cannot use now."""
        named = {device for one in requests for device in one.devices} - {*of_agents}
        every = lease_rows.leases_now(connection, now_ms, also=named)
        ids = named | {lease.device for lease in every}
        of_agents_now = select(_agent_row.device, _agent_row.soc).where(_agent_row.device.in_(ids))
        agents = {row.device: row.soc for row in connection.execute(of_agents_now)}
        self._facts = {
            row.id: row for row in connection.execute(select(schema.device_state).where(_state_row.id.in_(ids)))
        }
        socs = dict.fromkeys(ids, "") | {device: row.soc for device, row in self._facts.items()} | agents
        self._now_ms = now_ms
        own = [lease for lease in every if busy_of_agents or lease.device not in agents or not lease.is_held(now_ms)]
        held = {lease.device for lease in every if lease.is_held(now_ms)}
        self.leases = [lease for lease in own if socs[lease.device] == soc]
        self.devices = [
            self._device(device)
            for device in sorted(ids - {*of_agents})
            if socs[device] == soc
            and (busy_of_agents or device not in agents or device not in held)
            and self._is_usable(device)
        ]
        known = {device.id for device in self.devices}
        self._far = [lease for lease in own if lease.is_held(now_ms) and lease.device not in known | agents.keys()]

    def labelled(self, quotas: Mapping[str, int]) -> Counter[tuple[str, str]]:
        """Return how many devices each user has of each label with a quota, except for `devices`."""
        return Counter(
            (lease.user, label)
            for lease in self._far
            for label in self._labels(lease.device)
            if f"{LABEL}{label}" in quotas
        )

    def _is_usable(self, device: str) -> bool:
        row = self._facts.get(device)
        return row is None or (row.in_service and row.health != "quarantined")

    def _labels(self, device: str) -> tuple[str, ...]:
        row = self._facts.get(device)
        return () if row is None else tuple(row.labels)

    def _device(self, device: str) -> LivingDevice:
        row = self._facts.get(device)
        names = () if row is None else tuple(name for name in (row.name, row.serial) if name)
        return LivingDevice(device, self._labels(device), names, runs_shards=False)


def _of_agents(connection: Connection, query: TextClause, asked: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Return rows of agents and submitted runs; none from a store on SQLite."""
    return () if connection.dialect.name == "sqlite" else connection.execute(query, asked).all()


def read_living(connection: Connection, soc: str, now_ms: int) -> list[LivingDevice]:
    """Return the living and fit devices of a SoC, free or not; at 0 ms, also devices of dead agents."""
    rows = connection.execute(_DEVICES, {"soc": soc, "now_ms": now_ms})
    return [living_device(row) for row in rows if row.is_fit]


def living_device(row: Row[Any]) -> LivingDevice:
    """Return a device of an agent, for decisions."""
    return LivingDevice(row.device, _texts(row.labels), (row.name, row.serial), kind=f"{row.soc}/{row.kind}/{row.os}")


def _orders(
    connection: Connection,
    of_soc: Mapping[str, Any],
    query: TextClause,
    more: Mapping[str, Any],
    *,
    skips_unreadable: bool,
) -> list[OpenOrder]:
    rows = _of_agents(connection, query, {**of_soc, **more})
    retries: dict[str, list[Retry]] = {}
    if runs := [row.run_id for row in rows if row.retries]:
        for found in connection.execute(_RETRIES, {"soc": of_soc["soc"], "runs": runs}):
            retries.setdefault(found.run_id, []).append(Retry(found.id, tuple(found.avoid)))
    orders = []
    for row in rows:
        try:
            orders.append(_open_order(row, retries))
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
            if not skips_unreadable:
                raise UnreadableRowError("run_order", row.run_id, f"{type(error).__name__}: {error}") from None
    return orders


def _open_order(row: Row[Any], retries: Mapping[str, Sequence[Retry]]) -> OpenOrder:
    return OpenOrder(
        run_id=row.run_id,
        user=row.user_name,
        priority=Priority(row.priority),
        since_ms=row.submitted_ms,
        ready=row.ready,
        retries=tuple(retries.get(row.run_id, ())),
        devices=_texts(row.devices),
        labels=_texts(row.labels),
        kinds=_texts(row.classes),
        most_devices=row.most_devices,
        held=row.held,
        lacking=int(row.lacking),
    )


def _elsewhere(
    connection: Connection, now_ms: int, quotas: Mapping[str, int], here: Mapping[str, int], keep: Collection[str]
) -> dict[str, int]:
    if not any(subject.startswith(USER) for subject in quotas):
        return {}
    live = (_lease_row.token != "", _lease_row.expires_ms > now_ms, _lease_row.device.not_in(list(keep)))
    query = select(_lease_row.user_name, func.count().label("n")).where(*live).group_by(_lease_row.user_name)
    everywhere = {row.user_name: row.n - here.get(row.user_name, 0) for row in connection.execute(query)}
    return {user: n for user, n in everywhere.items() if n > 0}


def _labelled(
    connection: Connection,
    of_soc: Mapping[str, Any],
    quotas: Mapping[str, int],
    keep: Collection[str],
    *,
    also_here: bool,
) -> Counter[tuple[str, str]]:
    labels = [subject.removeprefix(LABEL) for subject in quotas if subject.startswith(LABEL)]
    if not labels:
        return Counter()
    asked = {**of_soc, "labels": labels, "keep": list(keep), "also_here": also_here}
    return Counter({(row.user_name, row.label): row.n for row in _of_agents(connection, _LABELLED, asked)})


@functools.lru_cache(maxsize=4096)
def _texts(encoded: str) -> tuple[str, ...]:
    return msgspec.json.decode(encoded, type=tuple[str, ...])
