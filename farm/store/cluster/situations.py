"""What a decision about the devices of a SoC looks at, from rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import text

from farm.store.cluster.quotas import read_quotas
from farm.store.leases.rows import decode_devices
from farm.store.leases.rules import Lease, Priority, Request
from farm.store.leases.situation import LABEL, LivingDevice, OpenOrder, Retry, Situation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sqlalchemy import Connection, Row

_DEVICES = text("""
    SELECT agent_device.device, agent_device.soc, agent_device.kind, agent_device.os, agent_device.serial,
           agent_device.name, CAST(agent_device.labels AS text) AS labels, agent_device.refused = '' AND NOT is_draining
               AND NOT has_left AND agent.expires_ms > :now_ms
               AND coalesce(device_state.in_service AND device_state.health <> 'quarantined', true) AS is_fit,
           lease.fence, lease.token, lease.user_name, lease.host, lease.pid, lease.purpose, lease.priority,
           lease.acquired_ms, lease.expires_ms, lease.reserved_for, lease.reserved_until_ms, lease.wanted_by
    FROM agent_device JOIN agent ON agent.name = agent_device.agent
    LEFT JOIN lease ON lease.device = agent_device.device
    LEFT JOIN device_state ON device_state.id = agent_device.device
    WHERE agent_device.soc = :soc
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
      AND (most_failures IS NULL OR failures < most_failures)
""")
_RETRIES = text("""
    SELECT run_id, id, avoid FROM shard
    WHERE soc = :soc AND state = 'waiting' AND lacking = 0 AND retry AND run_id = ANY(:runs) ORDER BY position, id
""")
_WAITING = text("""
    SELECT id, devices, wanted, user_name, priority, since_ms FROM waiter WHERE expires_ms > :now_ms AND wanted > 0
""")
_RUNNING = text("SELECT device FROM shard WHERE soc = :soc AND state = 'held'")
_ALL_HOLDINGS = text("""
    SELECT user_name, count(*) AS n FROM lease WHERE token <> '' AND expires_ms > :now_ms GROUP BY user_name
""")
_LABELLED = text("""
    SELECT user_name, label, count(*) AS n
    FROM lease JOIN agent_device ON agent_device.device = lease.device
    CROSS JOIN LATERAL json_array_elements_text(agent_device.labels) AS label
    WHERE token <> '' AND lease.expires_ms > :now_ms AND label = ANY(:labels) AND agent_device.soc <> :soc
    GROUP BY user_name, label
""")


class Known(msgspec.Struct):
    """The situation of a SoC, and what the rows say beside it."""

    situation: Situation
    leases: dict[str, Lease]
    """All of its devices, by id, as they are."""
    wanted: dict[str, str]
    """Devices that somebody has a better right to, as was decided before."""


def read_situation(
    connection: Connection, soc: str, now_ms: int, *, asking: Collection[str] = (), keep: Mapping[str, Lease] = {}
) -> Known:
    """Return the situation of a SoC; devices in `keep` are free in it for whoever holds them now."""
    of_soc = {"soc": soc, "now_ms": now_ms}
    rows = connection.execute(_DEVICES, of_soc).all()
    leases = {row.device: lease_of_device(row) for row in rows if row.fence is not None}
    devices = [living_device(row) for row in rows if row.is_fit]
    orders = _orders(connection, of_soc)
    quotas = read_quotas(connection)
    here = [lease for device, lease in leases.items() if device not in keep]
    situation = Situation(
        soc=soc,
        now_ms=now_ms,
        devices=devices,
        leases=[lease for lease in here if lease.is_held(now_ms) or lease.reserved_by(now_ms)],
        orders=orders,
        requests=read_requests(connection, now_ms),
        quotas=quotas,
        elsewhere=_elsewhere(connection, now_ms, leases.values()),
        elsewhere_labelled=_elsewhere_labelled(connection, of_soc, quotas),
        asking=asking,
        running=frozenset(connection.scalars(_RUNNING, {"soc": soc})),
    )
    return Known(situation, leases, {row.device: row.wanted_by for row in rows if row.wanted_by})


def read_requests(connection: Connection, now_ms: int) -> list[Request]:
    """Return what processes that are alive wait for."""
    return [
        Request(row.id, decode_devices(row.devices), row.wanted, row.user_name, Priority(row.priority), row.since_ms)
        for row in connection.execute(_WAITING, {"now_ms": now_ms})
    ]


def living_device(row: Row[Any]) -> LivingDevice:
    """Return a device of an agent as decisions see it."""
    return LivingDevice(row.device, _texts(row.labels), (row.name, row.serial), kind=f"{row.soc}/{row.kind}/{row.os}")


def lease_of_device(row: Row[Any]) -> Lease:
    """Return the lease of a row that has its columns beside others."""
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


def _orders(connection: Connection, of_soc: Mapping[str, Any]) -> list[OpenOrder]:
    rows = connection.execute(_ORDERS, of_soc).all()
    retries: dict[str, list[Retry]] = {}
    if runs := [row.run_id for row in rows if row.retries]:
        for found in connection.execute(_RETRIES, {**of_soc, "runs": runs}):
            retries.setdefault(found.run_id, []).append(Retry(found.id, tuple(found.avoid)))
    return [
        OpenOrder(
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
        for row in rows
    ]


def _elsewhere(connection: Connection, now_ms: int, here: Iterable[Lease]) -> dict[str, int]:
    everywhere = {row.user_name: int(row.n) for row in connection.execute(_ALL_HOLDINGS, {"now_ms": now_ms})}
    for lease in here:
        if lease.is_held(now_ms) and lease.user in everywhere:
            everywhere[lease.user] -= 1
    return {user: n for user, n in everywhere.items() if n > 0}


def _elsewhere_labelled(
    connection: Connection, of_soc: Mapping[str, Any], quotas: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    labels = [subject.removeprefix(LABEL) for subject in quotas if subject.startswith(LABEL)]
    if not labels:
        return {}
    return {
        (row.user_name, row.label): int(row.n) for row in connection.execute(_LABELLED, {**of_soc, "labels": labels})
    }


@functools.lru_cache(maxsize=4096)
def _texts(encoded: str) -> tuple[str, ...]:
    return msgspec.json.decode(encoded, type=tuple[str, ...])
