"""Who starts a night: one row for each time that it is due, whoever writes it starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import text

from farm.base.text import one_line
from farm.store import values
from farm.store.cluster.part import ClusterPart
from farm.store.cluster.records import NightStart

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from farm.store.cluster.records import AgentId, NightState

_COLUMNS = "name, due_ms, state, agent, started_ms, ended_ms, exit_code, why"
# Two of one name are decided one after the other, also where they are due at different times.
_LOCK = text("SELECT pg_advisory_xact_lock(hashtext('farm night'), hashtext(:name))")
_IS_KNOWN = text("SELECT 1 FROM night_start WHERE name = :name AND due_ms >= :due_ms")
_IS_MINE = text("""
    SELECT 1 FROM night_start WHERE name = :name AND due_ms = :due_ms AND token = :token AND state = 'running'
""")
_HAS_PAST = text("SELECT 1 FROM night_start WHERE name = :name")
_ALIVE = text("SELECT 1 FROM agent WHERE name = :agent AND token = :token AND NOT has_left AND expires_ms > :now_ms")
# One that runs has an agent that lives, or did until a moment ago and may come back for it.
_RUNNING = text("""
    SELECT night_start.agent FROM night_start JOIN agent ON agent.name = night_start.agent
    WHERE night_start.name = :name AND night_start.state = 'running' AND agent.expires_ms > :now_ms - :patience_ms
""")
_INSERT = text("""
    INSERT INTO night_start (name, due_ms, state, agent, token, started_ms, why)
    VALUES (:name, :due_ms, :state, :agent, :token, :now_ms, :why) ON CONFLICT DO NOTHING
""")
_END = text("""
    UPDATE night_start SET state = :state, ended_ms = :now_ms, exit_code = :exit_code, why = :why
    WHERE name = :name AND due_ms = :due_ms AND token = :token AND state = 'running'
""")
_TAKE_UP = text(f"""
    UPDATE night_start SET state = 'running', token = :token, ended_ms = NULL, exit_code = NULL, why = ''
    WHERE agent = :agent AND token <> :token AND state IN ('running', 'stopped', 'lost') AND name = :name
      AND due_ms = (SELECT max(due_ms) FROM night_start WHERE name = :name) AND due_ms > :since_ms
    RETURNING {_COLUMNS}
""")  # noqa: S608 - a constant
_LOSE = text("""
    UPDATE night_start SET state = 'lost', ended_ms = :now_ms, why = :why
    WHERE state = 'running' AND NOT EXISTS (
        SELECT 1 FROM agent WHERE agent.name = night_start.agent AND agent.expires_ms > :now_ms - :patience_ms
    )
""")
_RECENT = text(f"SELECT {_COLUMNS} FROM night_start ORDER BY due_ms DESC, name LIMIT :most")  # noqa: S608 - a constant

PATIENCE_MS = 600_000
"""An agent that was not heard of for so long does not come back for the night that it runs."""


class NightStarts(ClusterPart):
    """The starts of nights; one of a name is decided at a time."""

    def now_ms(self) -> int:
        """Return the time as the database has it; epoch, milliseconds."""
        with self._database.reading() as connection:
            return self._clock(connection)

    def begin(self, agent: AgentId, name: str, due_ms: int, *, late_ms: int) -> NightState:
        """Return `running` for the one agent that is to start the night of `name` that was due, once; else why not.

        `ended`: it is another's, or over. `missed`: it is too late by now, or another time. `skipped`: the night before
        of that name still runs. The last two are kept for people to see. The agent whose night runs gets `running`
        again: the first answer may be lost.
        """
        identity = {"name": values.clean(name, 128), "due_ms": due_ms, "agent": agent.name, "token": agent.token}

        def change(connection: Connection) -> NightState:
            # What is told every minute costs no lock.
            if connection.scalar(_IS_KNOWN, identity) is not None:
                return "ended" if connection.scalar(_IS_MINE, identity) is None else "running"
            connection.execute(_LOCK, identity)
            now_ms = self._clock(connection)
            if connection.scalar(_ALIVE, identity | {"now_ms": now_ms}) is None:
                return "ended"
            if connection.scalar(_IS_KNOWN, identity) is not None or now_ms < due_ms:
                return "ended"
            state: NightState = "running"
            why = ""
            if now_ms > due_ms + late_ms:
                state, why = "missed", "no host that has it was there in time"
                if connection.scalar(_HAS_PAST, identity) is None:
                    # A night that was never due before was not missed: it is new.
                    return state
            elif other := connection.scalar(_RUNNING, identity | {"now_ms": now_ms, "patience_ms": PATIENCE_MS}):
                state, why = "skipped", f"the night before still ran on {other}"
            connection.execute(_INSERT, identity | {"state": state, "now_ms": now_ms, "why": why})
            return state

        return self._database.write(change)

    def take_up(self, agent: AgentId, name: str, *, since_ms: int) -> NightStart | None:
        """Return the night that a former life of this agent left, for this one to go on with; None for none.

        Only the newest of its name counts, and only where it was due after `since_ms`.
        """
        wanted = {"agent": agent.name, "token": agent.token, "name": name, "since_ms": since_ms}

        def change(connection: Connection) -> NightStart | None:
            row = connection.execute(_TAKE_UP, wanted).first()
            return None if row is None else NightStart(*row)

        return self._database.write(change)

    def end(self, agent: AgentId, name: str, due_ms: int, *, exit_code: int | None, why: str, stopped: bool) -> None:
        """Record how a night ended that this agent started; `stopped`: it is not over, its agent was ended."""

        def change(connection: Connection) -> None:
            row = {"name": name, "due_ms": due_ms, "token": agent.token, "now_ms": self._clock(connection)}
            ending = {"state": "stopped" if stopped else "ended", "exit_code": exit_code}
            connection.execute(_END, row | ending | {"why": one_line(values.clean(why), 1000)})

        self._database.write(change)

    def lose(self) -> None:
        """Record the nights whose agents were not heard of for long as lost."""

        def change(connection: Connection) -> None:
            why = "its host was not heard of any more"
            connection.execute(_LOSE, {"now_ms": self._clock(connection), "patience_ms": PATIENCE_MS, "why": why})

        self._database.write(change)

    def recent(self, most: int = 20) -> list[NightStart]:
        """Return the newest starts, those that were missed among them."""
        with self._database.reading() as connection:
            return [NightStart(*row) for row in connection.execute(_RECENT, {"most": most})]
