"""What a decision about the devices of a SoC looks at, from rows."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import text

from farm.store.cluster.quotas import read_quotas
from farm.store.cluster.records import PROTOCOL
from farm.store.cluster.unreadable import reading
from farm.store.leases.rows import readable_requests
from farm.store.leases.rules import Lease, Priority, Request
from farm.store.leases.situation import LABEL, USER, LivingDevice, OpenOrder, Retry, Situation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import Connection, Row

_DEVICE = """
    SELECT agent_device.device, agent_device.soc, agent_device.kind, agent_device.os, agent_device.serial,
           agent_device.name, CAST(agent_device.labels AS text) AS labels,
           agent_device.refused = '' AND NOT is_draining AND NOT has_left AND agent.expires_ms > :now_ms
               AND coalesce(device_state.in_service AND device_state.health <> 'quarantined', true) AS is_fit,
           lease.fence, lease.token, lease.user_name, lease.host, lease.pid, lease.purpose, lease.priority,
           lease.acquired_ms, lease.expires_ms, lease.reserved_for, lease.reserved_until_ms, lease.wanted_by
    FROM agent_device JOIN agent ON agent.name = agent_device.agent JOIN lease ON lease.device = agent_device.device
    LEFT JOIN device_state ON device_state.id = agent_device.device
    WHERE agent_device.soc = :soc
"""
_DEVICES = text(_DEVICE)
_FREE_DEVICES = text(f"""
    SELECT * FROM ({_DEVICE}) AS device
    WHERE is_fit AND (token = '' OR expires_ms <= :now_ms OR device = ANY(:keep))
""")  # noqa: S608 - constants
# Of each run only as many as could begin.
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
_WAITING = text("""
    SELECT id, devices, wanted, user_name, priority, since_ms FROM waiter WHERE expires_ms > :now_ms AND wanted > 0
""")
_RUNNING = text("SELECT device FROM shard WHERE soc = :soc AND state = 'held'")
# By priority as well: who has something that somebody else could have a better right to.
_HERE = text("""
    SELECT user_name, priority, count(*) AS n FROM lease JOIN agent_device ON agent_device.device = lease.device
    WHERE soc = :soc AND token <> '' AND expires_ms > :now_ms AND lease.device <> ALL(:keep)
    GROUP BY user_name, priority
""")
_EVERYWHERE = text("""
    SELECT user_name, count(*) AS n FROM lease
    WHERE token <> '' AND expires_ms > :now_ms AND device <> ALL(:keep) GROUP BY user_name
""")
_LABELLED = text("""
    SELECT user_name, label, count(*) AS n
    FROM lease JOIN agent_device ON agent_device.device = lease.device
    CROSS JOIN LATERAL json_array_elements_text(agent_device.labels) AS label
    WHERE token <> '' AND lease.expires_ms > :now_ms AND label = ANY(:labels) AND lease.device <> ALL(:keep)
      AND (:also_here OR agent_device.soc <> :soc)
    GROUP BY user_name, label
""")


class KnownSoc(msgspec.Struct):
    """The situation of a SoC, and what the rows say beside it."""

    situation: Situation
    leases: dict[str, Lease]
    """Of its devices, as they are."""
    wanted: dict[str, str] = {}
    """Devices that somebody has a better right to, as was decided before."""
    held: dict[tuple[Priority, str], int] = {}
    """How many devices are held beside `leases`, by priority and user."""


def read_situation(connection: Connection, soc: str, now_ms: int) -> KnownSoc:
    """Return the situation of a SoC with all of its devices and everything that waits."""
    of_soc = {"soc": soc, "now_ms": now_ms}
    rows = connection.execute(_DEVICES, of_soc).all()
    leases = {row.device: lease_of_row(row) for row in rows}
    quotas = read_quotas(connection)
    here = Counter(lease.user for lease in leases.values() if lease.is_held(now_ms))
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=[living_device(row) for row in rows if row.is_fit],
        leases=[lease for lease in leases.values() if lease.is_held(now_ms) or lease.reserved_by(now_ms)],
        orders=_with_retries(connection, of_soc, connection.execute(_ORDERS, {**of_soc, "protocol": PROTOCOL}).all()),
        requests=read_requests(connection, now_ms),
        quotas=quotas,
        elsewhere=_elsewhere(connection, of_soc, quotas, here, ()),
        elsewhere_labelled=_labelled(connection, of_soc, quotas, (), also_here=False),
        running=frozenset(connection.scalars(_RUNNING, {"soc": soc})),
    )
    return KnownSoc(situation, leases, {row.device: row.wanted_by for row in rows if row.wanted_by})


def read_free(
    connection: Connection, soc: str, now_ms: int, *, asking: Collection[str], keep: Collection[str]
) -> KnownSoc:
    """Return the situation of a SoC as far as its free devices go, which are few on a farm that is busy.

    Devices in `keep` are free for whoever holds them now.
    """
    of_soc = {"soc": soc, "now_ms": now_ms, "keep": list(keep)}
    rows = connection.execute(_FREE_DEVICES, of_soc).all()
    leases = {row.device: lease_of_row(row) for row in rows}
    held: dict[tuple[Priority, str], int] = {}
    here: Counter[str] = Counter()
    for row in connection.execute(_HERE, of_soc):
        held[Priority(row.priority), row.user_name] = row.n
        here[row.user_name] += row.n
    quotas = read_quotas(connection)
    asked = {**of_soc, "most": len(rows) + 1, "protocol": PROTOCOL}
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=[living_device(row) for row in rows],
        leases=[lease for lease in leases.values() if lease.reserved_by(now_ms) and not lease.is_held(now_ms)],
        orders=_with_retries(
            connection,
            of_soc,
            connection.execute(_READY, asked).all(),
        ),
        requests=read_requests(connection, now_ms),
        quotas=quotas,
        here=here,
        elsewhere=_elsewhere(connection, of_soc, quotas, here, keep),
        elsewhere_labelled=_labelled(connection, of_soc, quotas, keep, also_here=True),
        asking=asking,
    )
    return KnownSoc(situation, leases, held=held)


def read_living(connection: Connection, soc: str, now_ms: int) -> list[LivingDevice]:
    """Return the devices of a SoC that are alive and fit, whoever has them; at 0 ms, also those of the dead."""
    rows = connection.execute(_DEVICES, {"soc": soc, "now_ms": now_ms})
    return [living_device(row) for row in rows if row.is_fit]


def read_requests(connection: Connection, now_ms: int) -> list[Request]:
    """Return what processes that are alive wait for."""
    return readable_requests(connection.execute(_WAITING, {"now_ms": now_ms}))


def living_device(row: Row[Any]) -> LivingDevice:
    """Return a device of an agent as decisions see it."""
    return LivingDevice(row.device, _texts(row.labels), (row.name, row.serial), kind=f"{row.soc}/{row.kind}/{row.os}")


def lease_of_row(row: Row[Any]) -> Lease:
    """Return the lease of a row that has its columns, perhaps beside others."""
    return Lease(
        row.device,
        row.fence,
        row.token,
        row.user_name,
        row.host,
        row.pid,
        row.purpose,
        Priority(row.priority),
        row.acquired_ms,
        row.expires_ms,
        row.reserved_for,
        row.reserved_until_ms,
    )


def _with_retries(connection: Connection, of_soc: Mapping[str, Any], rows: Sequence[Row[Any]]) -> list[OpenOrder]:
    retries: dict[str, list[Retry]] = {}
    if runs := [row.run_id for row in rows if row.retries]:
        for found in connection.execute(_RETRIES, {"soc": of_soc["soc"], "runs": runs}):
            retries.setdefault(found.run_id, []).append(Retry(found.id, tuple(found.avoid)))
    return [_open_order(row, retries) for row in rows]


def _open_order(row: Row[Any], retries: Mapping[str, Sequence[Retry]]) -> OpenOrder:
    with reading("run_order", row.run_id):
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
    connection: Connection,
    of_soc: Mapping[str, Any],
    quotas: Mapping[str, int],
    here: Mapping[str, int],
    keep: Collection[str],
) -> dict[str, int]:
    if not any(subject.startswith(USER) for subject in quotas):
        return {}
    asked = {"now_ms": of_soc["now_ms"], "keep": list(keep)}
    everywhere = {row.user_name: row.n - here.get(row.user_name, 0) for row in connection.execute(_EVERYWHERE, asked)}
    return {user: n for user, n in everywhere.items() if n > 0}


def _labelled(
    connection: Connection,
    of_soc: Mapping[str, Any],
    quotas: Mapping[str, int],
    keep: Collection[str],
    *,
    also_here: bool,
) -> dict[tuple[str, str], int]:
    labels = [subject.removeprefix(LABEL) for subject in quotas if subject.startswith(LABEL)]
    if not labels:
        return {}
    asked = {**of_soc, "labels": labels, "keep": list(keep), "also_here": also_here}
    return {(row.user_name, row.label): row.n for row in connection.execute(_LABELLED, asked)}


@functools.lru_cache(maxsize=4096)
def _texts(encoded: str) -> tuple[str, ...]:
    return msgspec.json.decode(encoded, type=tuple[str, ...])
