"""Agents: registration, heartbeats with their answers, hosts and devices."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, text

from farm.base.errors import AgentRefusedError
from farm.policy.situation import Lease
from farm.store import values
from farm.store.cluster.part import ClusterPart, notify
from farm.store.cluster.records import Agent, AgentFacts, AgentId, Claimed, HeartbeatReply
from farm.store.cluster.shard_rows import WAIT_AGAIN
from farm.store.leases import rows as lease_rows

_OF_NAME = text("SELECT * FROM agent WHERE name = :name FOR UPDATE")
_OTHER_PROTOCOL = text("""
    SELECT 'agent ' || name AS who, CAST(facts AS jsonb) ->> 'protocol' AS protocol FROM agent
    WHERE NOT has_left AND expires_ms > :now_ms AND name <> :name
      AND CAST(CAST(facts AS jsonb) ->> 'protocol' AS integer) <> :protocol
    LIMIT 1
""")
_REGISTER = text("""
    INSERT INTO agent (name, token, user_name, facts, started_ms, heartbeat_ms, expires_ms, has_left, is_draining)
    VALUES (:name, :token, :user, :facts, :now_ms, :now_ms, :expires_ms, false, false)
    ON CONFLICT (name) DO UPDATE SET
        token = excluded.token, user_name = excluded.user_name, facts = excluded.facts,
        started_ms = excluded.started_ms, heartbeat_ms = excluded.heartbeat_ms, expires_ms = excluded.expires_ms,
        has_left = false, is_draining = false
""")
_TAKE_OVER = (
    text("UPDATE lease SET token = :token, expires_ms = :expires_ms WHERE token = :before"),
    text("UPDATE shard SET token = :token WHERE token = :before"),
)
_FACTS = text("UPDATE agent SET facts = :facts WHERE name = :name AND token = :token RETURNING name")
_GONE_DEVICES = text("DELETE FROM agent_device WHERE agent = :agent AND device <> ALL(:devices)")
# A device stays with its agent as long as that agent is alive.
_DEVICE = text("""
    INSERT INTO agent_device (device, agent, soc, kind, os, serial, name, labels, refused)
    VALUES (:device, :agent, :soc, :kind, :os, :serial, :name, CAST(:labels AS json), :refused)
    ON CONFLICT (device) DO UPDATE SET
        agent = excluded.agent, soc = excluded.soc, kind = excluded.kind, os = excluded.os, serial = excluded.serial,
        name = excluded.name, labels = excluded.labels, refused = excluded.refused
    WHERE agent_device.agent = excluded.agent OR NOT EXISTS (
        SELECT 1 FROM agent WHERE agent.name = agent_device.agent AND NOT has_left AND expires_ms > :now_ms
    )
""")
_MAY_LEASE = text("SELECT has_table_privilege('lease', 'UPDATE')")
_ME = """
    WITH now AS (SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint) AS ms),
    me AS (
        UPDATE agent SET heartbeat_ms = now.ms, expires_ms = now.ms + :ttl_ms FROM now
        WHERE name = :name AND token = :token AND NOT has_left RETURNING name, is_draining
    )
"""
# A heartbeat is a single statement: hundreds of agents send it every few seconds.
_HEARTBEAT = text(f"""
    {_ME}, kept AS (
        UPDATE lease SET expires_ms = now.ms + :ttl_ms FROM now, me WHERE lease.token = :token
        RETURNING lease.device, lease.fence, lease.wanted_by
    )
    SELECT
        (SELECT is_draining FROM me) AS is_draining,
        (SELECT json_object_agg(device, fence) FROM kept) AS kept,
        (SELECT json_object_agg(device, wanted_by) FROM kept WHERE wanted_by <> '') AS wanted,
        (SELECT json_agg(json_build_array(id, fence, device)) FROM shard
         WHERE token = :token AND state = 'held') AS shards,
        (SELECT json_agg(DISTINCT run_id) FROM shard JOIN run_order USING (run_id)
         WHERE token = :token AND shard.state = 'held' AND run_order.state = 'cancelled') AS cancelled,
        (SELECT json_agg(DISTINCT run_id) FROM shard JOIN run_order USING (run_id), now
         WHERE token = :token AND shard.state = 'held' AND run_order.state = 'open'
           AND (until_ms <= now.ms OR failures >= most_failures)) AS stopped,
        (SELECT json_agg(soc) FROM (
            SELECT DISTINCT soc FROM agent_device, now WHERE agent = :name AND refused = '' AND NOT EXISTS (
                SELECT 1 FROM lease WHERE lease.device = agent_device.device AND token <> '' AND expires_ms > now.ms
            )
        ) AS idle WHERE EXISTS (
            SELECT 1 FROM shard JOIN run_order USING (run_id), now
            WHERE shard.soc = idle.soc AND shard.state = 'waiting' AND shard.lacking = 0
              AND run_order.state = 'open' AND (until_ms IS NULL OR until_ms > now.ms)
        )) AS claimable
""")  # noqa: S608 - a constant
_HEARTBEAT_WITHOUT_LEASES = text(f"""
    {_ME} SELECT (SELECT is_draining FROM me) AS is_draining, NULL AS kept, NULL AS wanted, NULL AS shards,
                 NULL AS cancelled, NULL AS stopped, NULL AS claimable
""")  # noqa: S608 - a constant
_PUT_BACK = text(f"""
    {WAIT_AGAIN} AND shard.token = :token AND (:everything OR shard.id = ANY(:shards)) RETURNING shard.soc
""")
_GIVE_BACK = text("""
    UPDATE lease SET token = '', expires_ms = 0, wanted_by = ''
    WHERE token = :token AND (:everything OR device = ANY(:devices))
""")
_LEAVE = text("UPDATE agent SET has_left = true, expires_ms = 0 WHERE name = :name AND token = :token RETURNING name")
AGENTS = text("SELECT * FROM agent WHERE NOT has_left ORDER BY name")
_DRAIN = text("UPDATE agent SET is_draining = :on WHERE name = :name AND NOT has_left RETURNING name")


class Agents(ClusterPart):
    """Registration, heartbeats and list of agents."""

    def register(self, name: str, facts: AgentFacts, ttl_s: float, *, user: str, replaces: str = "") -> AgentId:
        """Register an agent and return its id; it is alive for `ttl_s`, and again with every heartbeat.

        The new agent takes over leases and shards of the former agent of this name: it records that agent's results,
        and then calls `begun`. `replaces` is the token of the former agent, if that one is known to have ended; else
        registration is refused until the former agent expires. Raises AgentRefusedError while another agent of this
        name is alive, and if a living agent has another protocol.
        """
        key, may_lease = values.clean(name, values.NAME_LIMIT), self.may_lease

        def insert(connection: Connection) -> AgentId:
            before = connection.execute(_OF_NAME, {"name": key}).first()
            now_ms = self._clock(connection)
            if before is not None and before.token != replaces and not before.has_left:
                left_ms = before.expires_ms - now_ms
                if left_ms > 0 or not lease_rows.is_stable(connection, _ms(ttl_s)):
                    raise AgentRefusedError(_taken(before, left_ms), may_pass=True)
            self._require_protocol(connection, key, facts.protocol, now_ms)
            agent = AgentId(key, secrets.token_hex(16), may_lease=may_lease)
            expires_ms = now_ms + _ms(ttl_s)
            row = {"name": key, "token": agent.token, "user": values.clean(user, values.NAME_LIMIT), "now_ms": now_ms}
            connection.execute(_REGISTER, {**row, "facts": _encode(facts), "expires_ms": expires_ms})
            if agent.may_lease and before is not None and before.token:
                for statement in _TAKE_OVER:
                    moved = {"token": agent.token, "before": before.token, "expires_ms": expires_ms}
                    connection.execute(statement, moved)
            self._write_devices(connection, agent, facts, now_ms)
            return agent

        return self._database.write(insert)

    @cached_property
    def may_lease(self) -> bool:
        """True unless the login belongs to a build host, which may hold no devices and shards."""
        with self._database.reading() as connection:
            return bool(connection.scalar(_MAY_LEASE))

    def begun(self, agent: AgentId) -> None:
        """Give back the leases and shards of the former agent, after the new one has recorded its results."""
        if agent.may_lease:
            why = "its agent was started again"
            self._database.write(lambda connection: put_back_held(connection, agent.token, why))

    def heartbeat(
        self,
        agent: AgentId,
        facts: AgentFacts | None,
        ttl_s: float,
        leases: Collection[Lease] = (),
        claimed: Claimed | None = None,
    ) -> HeartbeatReply:
        """Keep an agent and all its leases alive for `ttl_s`, and return news for it.

        `facts` are given only after a change. `leases` are the leases that the agent believes to have: lost ones are in
        `HeartbeatReply.lost`. An expired lease is renewed unless another process took the device.

        With `claimed` the store takes back every lease and shard of the agent outside `leases` and `claimed`: the
        connection broke before the answer to its claim arrived. No claim may run meanwhile.
        """
        us = {"name": agent.name, "token": agent.token, "ttl_ms": _ms(ttl_s)}

        if facts is not None:
            self._database.write(lambda connection: self._write_facts(connection, agent, facts))
        [row] = self._database.at_once(_HEARTBEAT if agent.may_lease else _HEARTBEAT_WITHOUT_LEASES, us)
        unanswered = _unanswered(row, leases, claimed) if claimed is not None else None
        if unanswered is not None:
            why = "the answer to the claim of its agent was lost"
            self._database.write(lambda connection: put_back_held(connection, agent.token, why, unanswered))
        return _minded(row, leases, claimed)

    def leave(self, agent: AgentId) -> None:
        """Unregister an agent, and give back its leases and shards."""

        def change(connection: Connection) -> None:
            if agent.may_lease:
                put_back_held(connection, agent.token, "its agent left")
            left = connection.scalar(_LEAVE, {"name": agent.name, "token": agent.token})
            if left is not None and agent.may_lease:
                connection.execute(_GONE_DEVICES, {"agent": agent.name, "devices": []})

        self._database.write(change)

    def agents(self) -> list[Agent]:
        """Return the agents that have not left, dead ones among them, by name."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            return [agent_of(row, now_ms) for row in connection.execute(AGENTS)]

    def drain(self, name: str, *, on: bool = True) -> bool:
        """Let an agent finish its work, take no new work and end, or revoke that; return False for an unknown agent."""

        def change(connection: Connection) -> bool:
            found = connection.scalar(_DRAIN, {"name": name, "on": on}) is not None
            if found:
                notify(connection, [f"drain {name}"])
            return found

        return self._database.write(change)

    def _require_protocol(self, connection: Connection, name: str, protocol: int, now_ms: int) -> None:
        asked = {"name": name, "protocol": protocol, "now_ms": now_ms}
        other = connection.execute(_OTHER_PROTOCOL, asked).first()
        if other is not None:
            older = int(other.protocol) > protocol
            remedy = "update farm on this host" if older else "update farm there"
            raise AgentRefusedError(
                f"this farm speaks protocol {protocol} of the shared farm, and {other.who} {other.protocol}: {remedy}"
            )

    def _write_facts(self, connection: Connection, agent: AgentId, facts: AgentFacts) -> None:
        row = {"name": agent.name, "token": agent.token, "facts": _encode(facts)}
        if connection.scalar(_FACTS, row) is not None:
            self._write_devices(connection, agent, facts, self._clock(connection))

    def _write_devices(self, connection: Connection, agent: AgentId, facts: AgentFacts, now_ms: int) -> None:
        if not agent.may_lease:
            return
        rows: list[dict[str, Any]] = [
            {
                "device": values.clean(device.id, values.NAME_LIMIT),
                "agent": agent.name,
                "soc": values.clean(device.soc, values.SOC_LIMIT),
                "kind": values.clean(device.kind, values.KIND_LIMIT),
                "os": values.clean(device.os, values.KIND_LIMIT),
                "serial": values.clean(device.serial, values.NAME_LIMIT),
                "name": values.clean(device.name, values.NAME_LIMIT),
                "labels": json.dumps([values.clean(label, values.NAME_LIMIT) for label in device.labels]),
                "refused": values.clean(device.refused, values.NAME_LIMIT),
                "now_ms": now_ms,
            }
            for device in sorted(facts.devices, key=lambda device: device.id)
        ]
        connection.execute(_GONE_DEVICES, {"agent": agent.name, "devices": [row["device"] for row in rows]})
        if rows:
            connection.execute(_DEVICE, rows)
            lease_rows.insert_free(connection, [row["device"] for row in rows])


def agent_of(row: Row[Any], now_ms: int) -> Agent:
    """Return the agent of a row, alive or not at `now_ms`."""
    facts = msgspec.json.decode(row.facts, type=AgentFacts)
    is_alive = not row.has_left and row.expires_ms > now_ms
    return Agent(row.name, row.user_name, row.started_ms, row.heartbeat_ms, is_alive, facts, row.is_draining)


class Held(NamedTuple):
    """Devices and shards held under the token of an agent."""

    devices: list[str]
    shards: list[int]


def put_back_held(connection: Connection, token: str, why: str, only: Held | None = None) -> int:
    """Give back all devices and shards held under a token, or `only` some, and return the number of shards."""
    rows = {"token": token, "everything": only is None, **(only or Held([], []))._asdict()}
    socs = connection.scalars(_PUT_BACK, {**rows, "why": why}).all()
    hints = {f"work {soc}" for soc in socs}
    connection.execute(_GIVE_BACK, rows)
    notify(connection, hints)
    return len(socs)


def _unanswered(row: Row[Any], leases: Iterable[Lease], claimed: Claimed) -> Held | None:
    """Return the devices and shards of an agent from a claim whose answer was lost; None for nothing."""
    known = {(lease.device, lease.fence) for lease in leases}
    held = Held(
        sorted(device for device, fence in (row.kept or {}).items() if (device, fence) not in known),
        sorted(id_ for id_, fence, _ in row.shards or () if (id_, fence) not in claimed),
    )
    return held if any(held) else None


def _minded(row: Row[Any], leases: Iterable[Lease], claimed: Claimed | None) -> HeartbeatReply:
    kept = row.kept or {}
    lost = {lease.device for lease in leases if kept.get(lease.device) != lease.fence}
    used = [
        (id_, fence, device) for id_, fence, device in row.shards or () if claimed is None or (id_, fence) in claimed
    ]
    return HeartbeatReply(
        lost=tuple(sorted(lost | ({device for _, _, device in used} - kept.keys()))),
        wanted=row.wanted or {},
        cancelled=tuple(sorted(row.cancelled or ())),
        stopped=tuple(sorted(row.stopped or ())),
        claimable=tuple(sorted(row.claimable or ())),
        replaced=row.is_draining is None,
        drain=bool(row.is_draining),
        claimed=frozenset((id_, fence) for id_, fence, _ in used),
    )


def _taken(before: Row[Any], left_ms: int) -> str:
    facts = msgspec.json.decode(before.facts, type=AgentFacts)
    return (
        f"an agent {before.name!r} lives on {facts.host} (process {facts.pid}): give this one another name "
        f"(--name), or end that one; if it is dead, try again in {max(left_ms / 1000, 10):.0f} s"
    )


def _encode(facts: AgentFacts) -> str:
    return msgspec.json.encode(facts).decode()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
