"""Bundles that build hosts make: who makes which, and what became of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import text

from farm.compile.protocol import BuildReply
from farm.errors import LeaseLostError
from farm.store import values
from farm.store.cluster.build_rows import drop_unwanted, find_builds, manifest_facts, offer, outcome_columns, settle
from farm.store.cluster.part import ClusterPart, lock_soc, notify
from farm.store.cluster.records import Build, HeldBuild, NewBuild
from farm.store.cluster.unreadable import reading
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from farm.bundles.bundle import Manifest
    from farm.store.cluster.records import AgentId

# No SoC is called so: choices among builds wait for each other as those about the devices of a SoC do.
_BUILDS = " builds"

# Of every user the first few, as they want them: so many are looked at, however many wait.
_FIRST = text("""
    SELECT first.key, first.user_name, first.priority, first.position
    FROM (SELECT DISTINCT user_name FROM run_order WHERE state = 'open') AS users
    CROSS JOIN unnest(CAST(:toolchains AS text[])) AS offered
    CROSS JOIN LATERAL (
        SELECT key, user_name, priority, position FROM build
        WHERE toolchain = offered AND state = 'waiting' AND user_name = users.user_name
          AND NOT jsonb_exists(CAST(put_back AS jsonb), :agent)
          -- A user whose run was cancelled may have another one that is open.
          AND EXISTS (SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
                      WHERE build_wanted.key = build.key AND failure IS NULL AND run_order.state = 'open')
        ORDER BY priority DESC, position, key LIMIT :most
    ) AS first
""")
_HELD = text("""
    SELECT user_name, count(*) AS n FROM build WHERE state = 'held' AND toolchain = ANY(:toolchains) GROUP BY user_name
""")
_ALIVE = text("SELECT 1 FROM agent WHERE name = :agent AND token = :token AND NOT has_left FOR SHARE")
_HOLD = text("""
    UPDATE build SET state = 'held', agent = :agent, token = :token, fence = fence + 1, held_ms = :now_ms
    WHERE key = :key AND state = 'waiting' RETURNING task, fence
""")
_OURS = "key = :key AND state = 'held' AND token = :token AND fence = :fence"
_ENDED = text(f"""
    UPDATE build SET state = :state, archive = :archive, nbytes = :nbytes, reply = :reply, log = :log, agent = '',
                     token = '', manifest = CAST(:manifest AS json)
    WHERE {_OURS} RETURNING key
""")  # noqa: S608 - a constant
_PUT_BACK = text(f"""
    UPDATE build SET state = 'waiting', agent = '', token = '',
        put_back = CASE WHEN :tried THEN
            CAST(CAST(put_back AS jsonb) || jsonb_build_object(CAST(:agent AS text), CAST(:why AS text)) AS json)
            ELSE put_back END
    WHERE {_OURS} RETURNING toolchain, put_back
""")  # noqa: S608 - a constant
# Hosts that are alive, offer its toolchain and have not given it up.
_OTHERS = text("""
    SELECT count(*) FROM agent
    WHERE NOT has_left AND expires_ms > :now_ms AND jsonb_exists(CAST(facts AS jsonb) -> 'toolchains', :toolchain)
      AND name <> ALL(:tried)
""")
_GIVE_UP = text("""
    UPDATE build SET state = 'failed', reply = :reply WHERE key = :key AND state = 'waiting' RETURNING key
""")


class BuildWork(ClusterPart):
    """What build hosts ask and say."""

    def claim_builds(self, agent: AgentId, toolchains: Sequence[str], most: int, *, ttl_s: float) -> list[HeldBuild]:
        """Return the bundles that an agent is to make now, at most `most`: they are its own until it dies.

        The more urgent go first, then those of the user for whom the fewest are being made.
        """
        del ttl_s  # They live as long as the agent does.
        offered = {"toolchains": list(toolchains), "agent": agent.name, "most": most}
        if not toolchains or most <= 0:
            return []

        def claim(connection: Connection) -> list[HeldBuild]:
            lock_soc(connection, _BUILDS)
            us = {"agent": agent.name, "token": agent.token}
            if connection.scalar(_ALIVE, us) is None:
                return []
            first = [tuple(row) for row in connection.execute(_FIRST, offered)]
            making = {row.user_name: int(row.n) for row in connection.execute(_HELD, offered)}
            now_ms = self._clock(connection)
            held = []
            for key in in_turns(first, making)[:most]:
                row = connection.execute(_HOLD, {"key": key, "now_ms": now_ms, **us}).first()
                if row is not None:
                    with reading("build", key):
                        held.append(HeldBuild(msgspec.json.decode(row.task, type=NewBuild), row.fence))
            return held

        return self._write(claim)

    def built(self, agent: AgentId, key: str, fence: int, build: Build, manifest: Manifest | None = None) -> None:
        """Record that a bundle is made and in the artifacts' store, also with every run that asked for it.

        Raises LeaseLostError where it is not the agent's to make any more.
        """
        facts = None if manifest is None else msgspec.json.encode(manifest_facts(build, manifest)).decode()
        self._end(agent, key, fence, msgspec.structs.replace(build, state="built"), facts, manifest)

    def failed(self, agent: AgentId, key: str, fence: int, build: Build) -> None:
        """Record that a bundle cannot be made, and tell those who asked for it so far. Raises LeaseLostError."""
        self._end(agent, key, fence, msgspec.structs.replace(build, state="failed"), None, None)

    def put_back_build(self, agent: AgentId, key: str, fence: int, *, why: str, tried: bool = True) -> None:
        """Let another make a bundle: it waits again.

        `tried`: this agent does not get it any more, and where no other living one has its toolchain it failed, as
        infrastructure, for the reasons of all that tried. Raises LeaseLostError.
        """
        reason = one_line(values.clean(why), 500)

        def change(connection: Connection) -> None:
            ours = {"key": key, "token": agent.token, "fence": fence, "agent": agent.name}
            row = connection.execute(_PUT_BACK, {**ours, "why": reason, "tried": tried}).first()
            if row is None:
                raise _lost(key)
            others = {"now_ms": self._clock(connection), "toolchain": row.toolchain, "tried": list(row.put_back)}
            if tried and not connection.scalar(_OTHERS, others):
                give_up(connection, key, row.put_back)
            else:
                drop_unwanted(connection, [key])
                notify(connection, [f"build {row.toolchain}"])

        self._database.write(change)

    def add_built(self, build: Build, manifest: Manifest | None = None) -> bool:
        """Record a bundle that somebody else made, or failed to make, and tell whether that was news."""

        def change(connection: Connection) -> bool:
            manifests = {} if manifest is None else {build.key: manifest}
            is_new = bool(offer(connection, [build], manifests, self._clock(connection)))
            if is_new:
                settle(connection, [build], manifests)
            return is_new

        return self._database.write(change)

    def build_of(self, keys: Iterable[str]) -> dict[str, Build]:
        """Return by key what is known of bundles."""
        wanted = list(keys)
        with self._database.reading() as connection:
            return find_builds(connection, wanted)

    def _end(
        self, agent: AgentId, key: str, fence: int, build: Build, facts: str | None, manifest: Manifest | None
    ) -> None:
        def change(connection: Connection) -> None:
            ours = {"key": key, "token": agent.token, "fence": fence, "manifest": facts}
            if connection.scalar(_ENDED, {**outcome_columns(build), **ours}) is None:
                raise _lost(key)
            settle(connection, [build], {} if manifest is None else {build.key: manifest})

        self._database.write(change)


def in_turns(first: Iterable[tuple[str, str, int, int]], making: dict[str, int]) -> list[str]:
    """Return the keys of bundles in the order in which they are made; pure.

    `first` are key, user, priority and position; `making` how many are being made by user.
    """
    waiting: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for key, user, priority, position in first:
        waiting.setdefault((-priority, user), []).append((position, key))
    for of_user in waiting.values():
        of_user.sort(reverse=True)
    has, order = Counter(making), []
    while waiting:
        urgency, user = min(waiting, key=lambda one: (one[0], has[one[1]], waiting[one][-1]))
        order.append(waiting[urgency, user].pop()[1])
        has[user] += 1
        if not waiting[urgency, user]:
            del waiting[urgency, user]
    return order


def give_up(connection: Connection, key: str, tried: dict[str, str]) -> None:
    """Let a bundle that waits fail as infrastructure: `tried` says why each host could not make it."""
    why = one_line("; ".join(f"{host}: {why}" for host, why in sorted(tried.items())), 2000)
    reply = BuildReply(key, ok=False, seconds=0.0, reason=why, infra=True)
    if connection.scalar(_GIVE_UP, {"key": key, "reply": msgspec.json.encode(reply).decode()}) is not None:
        settle(connection, [Build(key, "failed", reply=reply)], {})


def _lost(key: str) -> LeaseLostError:
    return LeaseLostError(f"bundle {key[:16]} is not this agent's to make any more: what it made is not recorded")
