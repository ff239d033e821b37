"""Agents of a shared farm: registration, heartbeats, and repair of the rows of dead ones."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Collection, Iterable
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, text

from farm.base.errors import AgentRefusedError, RowRefusedError, StoreError
from farm.policy.situation import Lease, usable
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store import rows, schema, values
from farm.store.cluster.part import ClusterPart, notify
from farm.store.cluster.records import Agent, AgentFacts, AgentId, Claimed, HeartbeatReply, Recovered
from farm.store.cluster.shards import WAIT_AGAIN, decode_names, jobs_left, note_done
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import mark_wanted, read_situation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farm.store.clock import Clock
    from farm.store.database import Database


# Agents: registration, heartbeats with their answers, hosts and devices.


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
_DEVICE_TEXTS = ("soc", "kind", "os", "serial", "name")
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
_DRAIN = text("UPDATE agent SET is_draining = true WHERE name = :name AND NOT has_left RETURNING name")


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

    def drain(self, name: str) -> bool:
        """Let an agent finish its work, take no new work and end; return False for an unknown agent."""

        def change(connection: Connection) -> bool:
            found = connection.scalar(_DRAIN, {"name": name}) is not None
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
        devices: list[dict[str, Any]] = [
            {
                **rows.fitted(schema.agent_device, **{name: getattr(device, name) for name in _DEVICE_TEXTS}),
                "refused": values.clean(device.refused, values.NAME_LIMIT),
                "device": lease_rows.device_key(device.id),
                "agent": agent.name,
                "labels": json.dumps([values.clean(label, values.NAME_LIMIT) for label in device.labels]),
                "now_ms": now_ms,
            }
            for device in sorted(facts.devices, key=lambda device: device.id)
        ]
        connection.execute(_GONE_DEVICES, {"agent": agent.name, "devices": [row["device"] for row in devices]})
        if devices:
            connection.execute(_DEVICE, devices)
            lease_rows.insert_free(connection, [row["device"] for row in devices])


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


# Repair of rows: the work of dead agents goes to others.


# A shard waits so long for a device of its kind to come back: a restarted host, a cable.
_ABANDONED_MS = 60_000

# After so many deaths of agents with a shard, the job that they ran is at fault.
_MOST_DEATHS = 3
# An agent without a heartbeat for a day is no longer listed.
_FORGOTTEN_MS = 86_400_000

# A lock of the session, as a pass has many transactions; PostgreSQL releases it when the connection ends.
_LOCK = text("SELECT pg_try_advisory_lock(hashtext('farm recover'))")
_UNLOCK = text("SELECT pg_advisory_unlock(hashtext('farm recover'))")
_LOOK = text("""
    WITH now AS (SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint) AS ms)
    SELECT now.ms AS now_ms,
        (SELECT json_agg(json_build_array(name, token)) FROM agent
         WHERE NOT has_left AND expires_ms <= now.ms AND (
             EXISTS (SELECT 1 FROM shard WHERE shard.token = agent.token AND shard.state = 'held')
             OR EXISTS (SELECT 1 FROM lease WHERE lease.token = agent.token))) AS dead,
        (SELECT json_agg(id) FROM shard WHERE state = 'held' AND NOT EXISTS (
             SELECT 1 FROM lease WHERE lease.device = shard.device AND lease.fence = shard.fence
             AND lease.token = shard.token)) AS orphans,
        (SELECT json_agg(DISTINCT soc) FROM shard JOIN run_order USING (run_id)
         WHERE shard.state = 'waiting' AND lacking = 0 AND run_order.state = 'open') AS ready,
        (SELECT json_agg(name) FROM agent WHERE NOT has_left AND expires_ms < now.ms - :forgotten_ms) AS forgotten,
        EXISTS (SELECT 1 FROM shard WHERE state = 'waiting' AND tries >= :most_deaths) AS deadly,
        (SELECT count(*) FROM shard WHERE retry AND state = 'waiting' AND held_ms < now.ms - :abandoned_ms) AS retries,
        EXISTS (SELECT 1 FROM run_order WHERE state <> 'ended') AS is_busy
    FROM now
""")
_STILL_DEAD = text("""
    SELECT name FROM agent WHERE name = :name AND token = :token AND NOT has_left AND expires_ms <= :now_ms FOR UPDATE
""")
_TRIED = text("""
    UPDATE shard SET tries = tries + 1
    WHERE token = :token AND state = 'held' AND (:everything OR id = ANY(:shards))
""")
_HELD = text("""
    SELECT ARRAY(SELECT device FROM lease WHERE token = :token ORDER BY device) AS devices,
           ARRAY(SELECT id FROM shard WHERE token = :token AND state = 'held' ORDER BY id) AS shards
""")
# Shards whose agents died too often: the job that they ran is recorded as infra.
_DEADLY = text("""
    SELECT id, run_id, done, jobs FROM shard JOIN shard_jobs ON shard_jobs.shard = shard.id
    WHERE id = :shard AND state = 'waiting' AND tries >= :most FOR UPDATE OF shard
""")
_DEADLY_IDS = text("SELECT id FROM shard WHERE state = 'waiting' AND tries >= :most ORDER BY id")
_FORGET = text("""
    UPDATE agent SET has_left = true WHERE name = :name AND NOT has_left AND expires_ms < :before_ms RETURNING name
""")
_FORGET_DEVICES = text("DELETE FROM agent_device WHERE agent = :name")
_ORPHANS = text(f"""
    {WAIT_AGAIN} AND shard.id = :shard
      AND NOT EXISTS (SELECT 1 FROM lease WHERE lease.device = shard.device AND lease.fence = shard.fence
                      AND lease.token = shard.token)
    RETURNING shard.id
""")  # noqa: S608 - a constant
_OLD_RETRIES = text("""
    SELECT id, run_id, soc FROM shard WHERE retry AND state = 'waiting' AND held_ms < :before_ms
""")
_ABANDON = text("""
    UPDATE shard SET state = 'ended', why = 'no other device is left to try it'
    WHERE id = :shard AND state = 'waiting' RETURNING id
""")


class AbandonedWork(ClusterPart):
    """Repair pass that a single agent at a time does every few seconds."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, clock)
        # The session lock does not exclude other threads that use the same session.
        self._passing = threading.Lock()

    def recover(self, *, ttl_s: float, is_stable: Callable[[], bool] = lease_rows.always_stable) -> Recovered:
        """Repair rows of dead agents and workers, and return the repairs.

        Return without repairs while another pass runs. Agents count as dead or forgotten, and retries as abandoned,
        only after the database has been up for `ttl_s`, and only if `is_stable` returns True: the database answered
        the caller all that time. `is_stable` is called after the database has answered, which may take a while.
        """
        with self._alone() as is_alone:
            return self._pass(round(ttl_s * 1000), is_stable) if is_alone else Recovered()

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield True with the lock against other passes held, False while another pass runs."""
        if not self._passing.acquire(blocking=False):
            yield False
            return
        try:
            [[is_alone]] = self._database.at_once(_LOCK, {})
            try:
                yield is_alone
            finally:
                if is_alone:
                    # A broken connection has lost the lock already.
                    with suppress(StoreError):
                        self._database.at_once(_UNLOCK, {})
        finally:
            self._passing.release()

    def _pass(self, ttl_ms: int, is_stable: Callable[[], bool]) -> Recovered:
        asked = {"abandoned_ms": _ABANDONED_MS, "forgotten_ms": _FORGOTTEN_MS, "most_deaths": _MOST_DEATHS}

        def look(connection: Connection) -> tuple[Row[Any], bool]:
            row = connection.execute(_LOOK, asked).one()
            is_asked = bool(row.dead or row.forgotten or row.retries)
            return row, is_asked and lease_rows.is_stable(connection, ttl_ms, is_stable)

        # Silent agents count as dead only in a settled database.
        row, settled = self._database.write(look)
        lines = self._recover_rows(row, settled=settled)
        for soc in sorted(row.ready or ()):
            recover_soc = partial(self._recover_soc, soc=soc, has_old_retries=settled and bool(row.retries))
            lines += self._one(f"the work for {soc}", recover_soc)
        return Recovered(tuple(lines), is_busy=row.is_busy)

    def _recover_rows(self, row: Row[Any], *, settled: bool) -> list[str]:
        """Repair each agent and shard in a transaction of its own, and return the lines.

        Each statement checks its row again, which agents and clients may have changed since the look.
        """
        lines: list[str] = []
        for name, token in sorted(row.dead or ()) if settled else ():
            release = partial(self._release_dead, name=name, token=token, now_ms=row.now_ms)
            try:
                lines += self._database.write(release)
            except RowRefusedError:
                lines += self._release_row_by_row(name, token, release)
        for shard in sorted(row.orphans or ()):
            lines += self._one(f"shard {shard}", partial(_free_orphan, shard=shard))
        if row.deadly or lines:
            deadly = self._database.write(lambda one: one.scalars(_DEADLY_IDS, {"most": _MOST_DEATHS}).all())
            for shard in deadly:
                lines += self._one(f"shard {shard}", partial(_spare, number=shard))
        for name in sorted(row.forgotten or ()) if settled else ():
            lines += self._one(f"agent {name}", partial(_forget, name=name, now_ms=row.now_ms))
        return lines

    def _one(self, subject: str, repair: Callable[[Connection], list[str]]) -> list[str]:
        """Repair one row in a transaction of its own, and return its lines; a refused row stops no other repair."""
        try:
            return self._database.write(repair)
        except RowRefusedError as error:
            return [f"{subject} is not repaired: {error}"]

    def _release_dead(
        self, connection: Connection, *, name: str, token: str, now_ms: int, only: Held | None = None
    ) -> list[str]:
        if connection.scalar(_STILL_DEAD, {"name": name, "token": token, "now_ms": now_ms}) is None:
            return []
        connection.execute(_TRIED, {"token": token, "everything": only is None, "shards": only.shards if only else []})
        count = put_back_held(connection, token, f"agent {name} was not heard of", only)
        if only is None:
            return [f"agent {name} is not heard of: {count} of its shards wait again"]
        return [f"agent {name} is not heard of: shard {shard} waits again" for shard in only.shards if count]

    def _release_row_by_row(self, name: str, token: str, release: Callable[..., list[str]]) -> list[str]:
        """Put back each row of a dead agent in a transaction of its own, after the database refused any of them."""
        held = self._database.write(lambda connection: connection.execute(_HELD, {"token": token}).one())
        rows = [(f"shard {one}", Held([], [one])) for one in held.shards]
        rows += [(f"device {one}", Held([one], [])) for one in held.devices]
        return [line for row, only in rows for line in self._one(f"{row} of agent {name}", partial(release, only=only))]

    def _recover_soc(self, connection: Connection, *, soc: str, has_old_retries: bool) -> list[str]:
        """Mark devices to hand over, and end retries without a device left to try them."""
        lease_rows.lock_soc(connection, soc)
        now_ms = self._clock(connection)
        known = read_situation(connection, soc, now_ms, lease_rows.requests_now(connection, now_ms))
        mark_wanted(connection, known)
        if not has_old_retries:
            return []
        old = {row.id for row in connection.execute(_OLD_RETRIES, {"before_ms": now_ms - _ABANDONED_MS})}
        lines = []
        for order in known.situation.orders:
            may = set(usable(order, known.situation.devices))
            for retry in order.retries:
                if retry.shard in old and (may or not retry.avoid) and may <= set(retry.avoid):
                    connection.execute(_ABANDON, {"shard": retry.shard})
                    lines.append(f"run {order.run_id}: no other device of {soc} is left to try shard {retry.shard}")
        return lines


def _free_orphan(connection: Connection, *, shard: int) -> list[str]:
    why = "the lease of its device ended"
    found = connection.scalars(_ORPHANS, {"shard": shard, "why": why}).all()
    return [f"shard {one} waits again: {why}" for one in found]


def _forget(connection: Connection, *, name: str, now_ms: int) -> list[str]:
    if connection.scalar(_FORGET, {"name": name, "before_ms": now_ms - _FORGOTTEN_MS}) is not None:
        connection.execute(_FORGET_DEVICES, {"name": name})
    return []


def _spare(connection: Connection, *, number: int) -> list[str]:
    """Record the job at which the agents of a shard died as infra, and let the following jobs go on."""
    shard = connection.execute(_DEADLY, {"shard": number, "most": _MOST_DEATHS}).first()
    if shard is None:
        return []
    deadly, *left = jobs_left(shard.jobs, shard.done)
    reason = f"{_MOST_DEATHS} times its host died during the job"
    attempt = Attempt(deadly.job.id, Verdict.INFRA, Stage.EXECUTE, reason, bundle_key=deadly.key, cause=Cause.WORKER)
    rows.insert_attempts(connection, shard.run_id, [(attempt, ())])
    note_done(connection, shard.id, [*decode_names(shard.done), deadly.job.id], [one.job.id for one in left])
    return [f"run {shard.run_id}: {deadly.job.id} is not tried again: {reason}"]
