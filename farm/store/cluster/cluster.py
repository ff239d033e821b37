"""Rows of a shared farm: `store.cluster`, and starts of scheduled nightly runs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from farm.base.errors import UsageError
from farm.base.text import one_line
from farm.store import values
from farm.store.cluster.agents import AbandonedWork, Agents
from farm.store.cluster.builds import BuildWork
from farm.store.cluster.orders import Orders, Views
from farm.store.cluster.part import ClusterPart
from farm.store.cluster.records import AgentId, NightlyStart, NightlyState
from farm.store.cluster.shards import Claims, ShardResults

if TYPE_CHECKING:
    from farm.store.clock import Clock
    from farm.store.database import Database


# Starts of nightly runs: one row per due time, written by the agent that starts it.


_COLUMNS = "name, due_ms, state, agent, started_ms, ended_ms, exit_code, why"
# Starts of one name are decided one after the other, also for different due times.
_LOCK = text("SELECT pg_advisory_xact_lock(hashtext('farm nightly_start'), hashtext(:name))")
_IS_KNOWN = text("SELECT 1 FROM nightly_start WHERE name = :name AND due_ms >= :due_ms")
_IS_MINE = text("""
    SELECT 1 FROM nightly_start WHERE name = :name AND due_ms = :due_ms AND token = :token AND state = 'running'
""")
_HAS_PAST = text("SELECT 1 FROM nightly_start WHERE name = :name")
_ALIVE = text("SELECT 1 FROM agent WHERE name = :agent AND token = :token AND NOT has_left AND expires_ms > :now_ms")
# A running nightly run has an agent that is alive, or that was alive a moment ago and may come back for it.
_RUNNING = text("""
    SELECT nightly_start.agent FROM nightly_start JOIN agent ON agent.name = nightly_start.agent
    WHERE nightly_start.name = :name AND nightly_start.state = 'running' AND agent.expires_ms > :now_ms - :patience_ms
""")
_INSERT = text("""
    INSERT INTO nightly_start (name, due_ms, state, agent, token, started_ms, why)
    VALUES (:name, :due_ms, :state, :agent, :token, :now_ms, :why) ON CONFLICT DO NOTHING
""")
_END = text("""
    UPDATE nightly_start SET state = :state, ended_ms = :now_ms, exit_code = :exit_code, why = :why
    WHERE name = :name AND due_ms = :due_ms AND token = :token AND state = 'running'
""")
_TAKE_UP = text(f"""
    UPDATE nightly_start SET state = 'running', token = :token, ended_ms = NULL, exit_code = NULL, why = ''
    WHERE agent = :agent AND token <> :token AND state IN ('running', 'stopped', 'lost') AND name = :name
      AND due_ms = (SELECT max(due_ms) FROM nightly_start WHERE name = :name) AND due_ms > :since_ms
    RETURNING {_COLUMNS}
""")  # noqa: S608 - a constant
_LOSE = text("""
    UPDATE nightly_start SET state = 'lost', ended_ms = :now_ms, why = :why
    WHERE state = 'running' AND NOT EXISTS (
        SELECT 1 FROM agent WHERE agent.name = nightly_start.agent AND agent.expires_ms > :now_ms - :patience_ms
    )
""")
_RECENT = text(f"SELECT {_COLUMNS} FROM nightly_start ORDER BY due_ms DESC, name LIMIT :most")  # noqa: S608 - a constant

PATIENCE_MS = 600_000
"""Time without a heartbeat, in milliseconds, after which a running nightly run of the agent is lost."""


class NightlyStarts(ClusterPart):
    """Starts of nightly runs; for each name one decision at a time."""

    def begin(self, agent: AgentId, name: str, due_ms: int, *, late_ms: int) -> NightlyState:
        """Return `running` to the only agent that has to start the nightly run `name` due at `due_ms`; else the reason.

        `ended`: another agent has it, or it is over. `missed`: more than `late_ms` have passed. `skipped`: the previous
        nightly run of that name still runs. The last two are recorded for people. The agent of a running nightly run
        gets `running` again: its first answer may be lost.
        """
        identity = {"name": values.clean(name, 128), "due_ms": due_ms, "agent": agent.name, "token": agent.token}

        def change(connection: Connection) -> NightlyState:
            # Agents ask every minute: the usual answer needs no lock.
            if connection.scalar(_IS_KNOWN, identity) is not None:
                return "ended" if connection.scalar(_IS_MINE, identity) is None else "running"
            connection.execute(_LOCK, identity)
            now_ms = self._clock(connection)
            if connection.scalar(_ALIVE, identity | {"now_ms": now_ms}) is None:
                return "ended"
            if connection.scalar(_IS_KNOWN, identity) is not None or now_ms < due_ms:
                return "ended"
            state: NightlyState = "running"
            why = ""
            if now_ms > due_ms + late_ms:
                state, why = "missed", "no host that has it was there in time"
                if connection.scalar(_HAS_PAST, identity) is None:
                    # A nightly run that was never due before was not missed: it is new.
                    return state
            elif other := connection.scalar(_RUNNING, identity | {"now_ms": now_ms, "patience_ms": PATIENCE_MS}):
                state, why = "skipped", f"the nightly run before still ran on {other}"
            connection.execute(_INSERT, identity | {"state": state, "now_ms": now_ms, "why": why})
            return state

        return self._database.write(change)

    def take_up(self, agent: AgentId, name: str, *, since_ms: int) -> NightlyStart | None:
        """Return the nightly run that this agent's former process left, to be continued by this one; None without one.

        Only the newest nightly run of the name counts, and only if it was due after `since_ms`.
        """
        wanted = {"agent": agent.name, "token": agent.token, "name": name, "since_ms": since_ms}
        row = self._database.write(lambda connection: connection.execute(_TAKE_UP, wanted).first())
        return None if row is None else NightlyStart(*row)

    def end(self, agent: AgentId, name: str, due_ms: int, *, exit_code: int | None, why: str, stopped: bool) -> None:
        """Record the end of a nightly run that this agent started; `stopped`: the agent ended first."""

        def change(connection: Connection) -> None:
            row = {"name": name, "due_ms": due_ms, "token": agent.token, "now_ms": self._clock(connection)}
            ending = {"state": "stopped" if stopped else "ended", "exit_code": exit_code}
            connection.execute(_END, row | ending | {"why": one_line(values.clean(why), 1000)})

        self._database.write(change)

    def lose(self) -> None:
        """Record running nightly runs as lost whose agents have sent no heartbeat for `PATIENCE_MS`."""

        def change(connection: Connection) -> None:
            why = "its host sent no further heartbeat"
            connection.execute(_LOSE, {"now_ms": self._clock(connection), "patience_ms": PATIENCE_MS, "why": why})

        self._database.write(change)

    def recent(self, most: int = 20) -> list[NightlyStart]:
        """Return the newest starts, missed ones included."""
        return [NightlyStart(*row) for row in self._rows(_RECENT, most=most)]


# Rows of a shared farm: `store.cluster`.


class Cluster(Orders, Claims, ShardResults, BuildWork, Agents, AbandonedWork, Views):
    """Store access of the clients and agents of a shared farm. Raises UsageError for a store other than PostgreSQL.

    Times are on the database's clock; every method is one transaction and raises StoreError if the database refuses.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        if database.is_sqlite:
            raise UsageError(f"{database.name}: several hosts share a store on PostgreSQL (docs/guides/three_hosts.md)")
        super().__init__(database, clock)

    @cached_property
    def nightly_runs(self) -> NightlyStarts:
        """Starts of scheduled nightly runs."""
        return NightlyStarts(self._database, self._clock)
