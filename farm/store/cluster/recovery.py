"""Repair of rows: the work of dead agents goes to others."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, text

from farm.base.errors import RowRefusedError, StoreError
from farm.policy.situation import usable
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store import rows
from farm.store.cluster.agents import Held, put_back_held
from farm.store.cluster.part import ClusterPart
from farm.store.cluster.records import Recovered
from farm.store.cluster.shard_rows import WAIT_AGAIN, decode_names, encode_names, jobs_left
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import mark_wanted, read_situation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farm.store.clock import Clock
    from farm.store.database import Database

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
_SPARED = text("""
    WITH noted AS (UPDATE shard_jobs SET done = :done, next_job = :next_job WHERE shard = :shard)
    UPDATE shard SET tries = 0, remaining = :left, state = CASE WHEN :left = 0 THEN 'ended' ELSE 'waiting' END
    WHERE id = :shard
""")
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
    done = [*decode_names(shard.done), deadly.job.id]
    noted = {"shard": shard.id, "done": encode_names(done), "next_job": left[0].job.id if left else ""}
    connection.execute(_SPARED, {**noted, "left": len(left)})
    return [f"run {shard.run_id}: {deadly.job.id} is not tried again: {reason}"]
