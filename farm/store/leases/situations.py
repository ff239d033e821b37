"""Situation of a SoC for the policy, from rows: the same for shards and for processes that wait.

Quotas belong to it. Devices that their holders have to hand over are decided from it, and marked in the leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    Request,
    Retry,
    Share,
    Situation,
)
from farm.store import schema, values
from farm.store.leases import rows as lease_rows
from farm.store.records import PROTOCOL
from farm.store.statements import Group

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
    since_ms = [
        order.since_ms for order in situation.orders if order.ready + len(order.retries) > given[order.run_id]
    ] + [one.since_ms for one in situation.requests if one.count > given[one.id]]
    if not since_ms:
        return
    is_news = max(since_ms) > situation.now_ms - _NEW_MS
    look_ms = _LOOK_FOR_NEWS_MS if is_news else _LOOK_MS
    asked = {"soc": situation.soc, "now_ms": situation.now_ms, "look_ms": look_ms}
    if connection.scalar(_LOOK, asked) is not None:
        mark_wanted(connection, read_situation(connection, situation.soc, situation.now_ms, situation.requests))


def mark_wanted(connection: Connection, known: KnownSoc) -> None:
    """Mark the devices of a SoC that holders have to hand over."""
    wanted = hand_over(known.situation)
    changed = {
        device: wanted.get(device, "")
        for device in sorted(wanted.keys() | known.wanted.keys())
        if known.wanted.get(device, "") != wanted.get(device, "")
    }
    if changed:
        connection.execute(_MARK, {"devices": list(changed), "users": list(changed.values())})
    if any(user and device not in known.wanted for device, user in changed.items()):
        connection.execute(_NOTIFY, {"hint": f"wanted {known.situation.soc}"})


_SUBJECT_LIMIT = 320
_SET = text("""
    INSERT INTO quota (subject, most, set_by, set_ms) VALUES (:subject, :most, :by, :now_ms)
    ON CONFLICT (subject) DO UPDATE SET most = excluded.most, set_by = excluded.set_by, set_ms = excluded.set_ms
""")


class Quotas(Group):
    """Quotas of a store. Every method is one transaction and raises StoreError."""

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
           agent_device.name, agent_device.labels,
           agent_device.refused = '' AND NOT is_draining AND NOT has_left AND agent.expires_ms > :now_ms
               AND coalesce(device_state.in_service AND device_state.health <> 'quarantined', true) AS is_fit,
           lease.fence, lease.token, lease.user_name AS "user", lease.host, lease.pid, lease.purpose, lease.priority,
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
# Startable shards of each run, counted up to :most; without :only_free, also runs that wait for bundles.
_ORDERS = text("""
    SELECT run_id, user_name AS "user", priority, submitted_ms AS since_ms, devices, labels, classes AS kinds,
           most_devices, ready, retries, lacking,
           CASE WHEN :only_free AND most_devices IS NULL THEN 0 ELSE (
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
    CROSS JOIN LATERAL (
        SELECT CASE WHEN :only_free THEN 0 ELSE (
            SELECT coalesce(sum(shard.lacking), 0) FROM shard
            WHERE soc = :soc AND shard.run_id = run_order.run_id AND shard.state = 'waiting') END AS lacking) AS later
    WHERE state = 'open' AND (until_ms IS NULL OR until_ms > :now_ms)
      AND (most_failures IS NULL OR failures < most_failures) AND (ready > 0 OR retries OR later.lacking > 0)
      AND protocol = :protocol
""")
_RETRIES = text("""
    SELECT run_id, id, avoid FROM shard
    WHERE soc = :soc AND state = 'waiting' AND lacking = 0 AND retry AND run_id = ANY(:runs) ORDER BY position, id
""")
_RUNNING = text("SELECT device FROM shard WHERE soc = :soc AND state = 'held'")
_HERE = text("""
    SELECT user_name, count(*) AS n FROM lease JOIN agent_device ON agent_device.device = lease.device
    WHERE soc = :soc AND token <> '' AND expires_ms > :now_ms AND lease.device <> ALL(:keep)
    GROUP BY user_name
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


def read_situation(
    connection: Connection,
    soc: str,
    now_ms: int,
    requests: Sequence[Request],
    *,
    only_free: bool = False,
    asking: Collection[str] = (),
    keep: Collection[str] = (),
    skips_unreadable: bool = False,
) -> KnownSoc:
    """Return the situation of a SoC: its devices, waiting runs and waiting processes.

    With `only_free`, busy devices of agents are only counted: few devices of a busy farm are free, and decisions that
    are made often read no others. Devices in `keep` are free for their holders. `requests` come from `requests_now`.
    `skips_unreadable` leaves out unreadable orders, which otherwise raise UnreadableRowError.
    """
    of_soc = {"soc": soc, "now_ms": now_ms, "keep": list(keep)}
    rows = _of_agents(connection, _FREE_DEVICES if only_free else _DEVICES, of_soc)
    leases = {row.device: lease_rows.lease_of(row) for row in rows}
    quotas = read_quotas(connection)
    fit = [living_device(row) for row in rows if row.is_fit]
    beside = _read_beside(connection, soc, now_ms, requests, {one.id for one in fit}, quotas, with_busy=not only_free)
    known = {
        lease.device: lease
        for lease in (*leases.values(), *beside.leases)
        if lease.device not in leases or not only_free or not lease.is_held(now_ms)
    }
    here = Counter({row.user_name: int(row.n) for row in _of_agents(connection, _HERE, of_soc)} if only_free else {})
    held = here + Counter(lease.user for lease in known.values() if lease.is_held(now_ms))
    # A file has no lasting loss of connection: an expired lease is free at once.
    keeps_silent = connection.dialect.name != "sqlite" and not only_free
    of_orders = {"protocol": PROTOCOL, "only_free": only_free, "most": len(rows) + 1 if only_free else None}
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=[*fit, *beside.devices],
        leases=[
            lease
            for lease in known.values()
            if lease.is_held(now_ms) or lease.reserved_by(now_ms) or (keeps_silent and lease.token)
        ],
        orders=_orders(connection, of_soc | of_orders, skips_unreadable=skips_unreadable),
        requests=requests,
        quotas=quotas,
        here=here,
        elsewhere=_elsewhere(connection, now_ms, quotas, held, keep),
        elsewhere_labelled=_labelled(connection, of_soc, quotas, also_here=only_free) + beside.labelled,
        asking=asking,
        running=() if only_free else frozenset(connection.scalars(_RUNNING, {"soc": soc})),
    )
    return KnownSoc(situation, leases, {row.device: row.wanted_by for row in rows if row.wanted_by})


class _Beside(NamedTuple):
    """Devices of a SoC without a living agent, which processes lease themselves."""

    leases: list[Lease]
    devices: list[LivingDevice]
    labelled: Counter[tuple[str, str]]
    """Number of devices that each user has of each label with a quota, except for `devices`."""


def _read_beside(
    connection: Connection,
    soc: str,
    now_ms: int,
    requests: Iterable[Request],
    of_agents: Collection[str],
    quotas: Mapping[str, int],
    *,
    with_busy: bool,
) -> _Beside:
    """`of_agents` are known already. `with_busy`: with devices that agents hold or cannot use now."""
    named = {device for one in requests for device in one.devices} - {*of_agents}
    every = lease_rows.leases_now(connection, now_ms, also=named)
    ids = named | {lease.device for lease in every}
    of_agents_now = select(_agent_row.device, _agent_row.soc).where(_agent_row.device.in_(ids))
    agents = {row.device: row.soc for row in connection.execute(of_agents_now)}
    states = connection.execute(select(schema.device_state).where(_state_row.id.in_(ids)))
    facts = {row.id: row for row in states}
    socs = dict.fromkeys(ids, "") | {device: row.soc for device, row in facts.items()} | agents
    held = {lease.device for lease in every if lease.is_held(now_ms)}
    ours = {device for device in ids if with_busy or device not in agents or device not in held}
    devices = []
    for device in sorted(ours - {*of_agents}):
        row = facts.get(device)
        if socs[device] != soc or (row is not None and (not row.in_service or row.health == "quarantined")):
            continue
        names = () if row is None else tuple(filter(None, (row.name, row.serial)))
        devices.append(LivingDevice(device, () if row is None else tuple(row.labels), names, runs_shards=False))
    far = (ours & held & facts.keys()) - agents.keys() - {one.id for one in devices}
    labelled = Counter(
        (lease.user, label)
        for lease in every
        if lease.device in far
        for label in facts[lease.device].labels
        if f"{LABEL}{label}" in quotas
    )
    return _Beside([one for one in every if one.device in ours and socs[one.device] == soc], devices, labelled)


def _of_agents(connection: Connection, query: TextClause, asked: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Return rows of agents and submitted runs; none from a store on SQLite."""
    return () if connection.dialect.name == "sqlite" else connection.execute(query, asked).all()


def read_living(connection: Connection, soc: str, now_ms: int) -> list[LivingDevice]:
    """Return the living and fit devices of a SoC, free or not; at 0 ms, also devices of dead agents."""
    rows = connection.execute(_DEVICES, {"soc": soc, "now_ms": now_ms})
    return [living_device(row) for row in rows if row.is_fit]


def living_device(row: Row[Any]) -> LivingDevice:
    """Return a device of an agent, for decisions."""
    return LivingDevice(row.device, tuple(row.labels), (row.name, row.serial), kind=f"{row.soc}/{row.kind}/{row.os}")


def _orders(connection: Connection, of_soc: Mapping[str, Any], *, skips_unreadable: bool) -> list[OpenOrder]:
    rows = _of_agents(connection, _ORDERS, of_soc)
    retries: dict[str, list[Retry]] = {}
    if runs := [row.run_id for row in rows if row.retries]:
        for found in connection.execute(_RETRIES, {"soc": of_soc["soc"], "runs": runs}):
            retries.setdefault(found.run_id, []).append(Retry(found.id, tuple(found.avoid)))
    orders = []
    for row in rows:
        try:
            facts = {**row._mapping, "retries": retries.get(row.run_id, ())}  # noqa: SLF001 - public in SQLAlchemy
            order = msgspec.convert(facts, OpenOrder)
            if order.priority != row.priority:
                raise msgspec.ValidationError(f"unknown priority {row.priority}")
            orders.append(order)
        except msgspec.ValidationError as error:
            if not skips_unreadable:
                raise UnreadableRowError("run_order", row.run_id, f"{type(error).__name__}: {error}") from None
    return orders


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
    *,
    also_here: bool,
) -> Counter[tuple[str, str]]:
    labels = [subject.removeprefix(LABEL) for subject in quotas if subject.startswith(LABEL)]
    if not labels:
        return Counter()
    asked = {**of_soc, "labels": labels, "also_here": also_here}
    return Counter({(row.user_name, row.label): row.n for row in _of_agents(connection, _LABELLED, asked)})
