"""Assignment of shards to devices, with the leases: one decision at a time per SoC, under the lock of the SoC."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, text

from farm.policy.retries import MOST_DEVICES
from farm.policy.sharing import share_out
from farm.policy.situation import Lease, LivingDevice, Priority, Share, usable
from farm.store.cluster.builds import find_builds, find_failures
from farm.store.cluster.part import ClusterPart, reading
from farm.store.cluster.records import AgentId, HeldShard, PlannedJob
from farm.store.cluster.shard_rows import jobs_left
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import KnownSoc, look_for_wanted, read_living, read_situation

# Other devices for a second try of a failed job: age of the cached list in seconds, and their greatest number.
_LIVING_S = 3.0
_MOST_OTHERS = 16

_ALIVE = text("""
    SELECT CAST(facts AS json) ->> 'host' AS host, CAST(CAST(facts AS json) ->> 'pid' AS integer) AS pid FROM agent
    WHERE name = :agent AND token = :token AND NOT has_left AND NOT is_draining AND expires_ms > :now_ms FOR SHARE
""")
# Devices locked by another claim and devices reserved for another user are left out.
_FREE = text("""
    SELECT lease.device, token = '' AS is_free FROM lease
    JOIN unnest(CAST(:devices AS text[]), CAST(:users AS text[])) AS mine (device, user_name)
         ON mine.device = lease.device
    WHERE CASE WHEN lease.device = ANY(:keep) THEN token = :token
               ELSE token = '' OR expires_ms <= :now_ms END
      AND (reserved_until_ms <= :now_ms OR reserved_from_ms > :now_ms OR reserved_for = mine.user_name)
    ORDER BY lease.device FOR UPDATE OF lease SKIP LOCKED
""")
_FIRST = text("""
    SELECT id FROM shard
    WHERE run_id = :run AND soc = :soc AND state = 'waiting' AND lacking = 0 AND NOT retry
    ORDER BY position, id LIMIT :most FOR UPDATE SKIP LOCKED
""")
# Returns the jobs as well, which are in a row of `shard_jobs`.
_HOLD = text("""
    UPDATE shard SET state = 'held', device = :device, fence = :fence, agent = :agent, token = :token,
                     held_ms = :now_ms, why = ''
    FROM run_order, shard_jobs
    WHERE shard.id = :shard AND shard.state = 'waiting' AND run_order.run_id = shard.run_id
      AND run_order.state = 'open' AND shard_jobs.shard = shard.id
    RETURNING shard.id, shard.run_id, run_order.user_name, run_order.purpose, run_order.priority,
              run_order.terms, shard_jobs.jobs, shard_jobs.done
""")


class Claims(ClusterPart):
    """Assignment of work to agents."""

    def claim(
        self,
        agent: AgentId,
        soc: str,
        devices: Sequence[str],
        *,
        ttl_s: float,
        keep: Mapping[str, Lease] | None = None,
        is_stable: Callable[[], bool] = lease_rows.always_stable,
    ) -> list[HeldShard]:
        """Return shards for idle devices of an agent, each with a lease of its device for `ttl_s`.

        `keep` are devices at the end of a shard: they count as free, and keep their fence for their next shard, of any
        user. Devices that are not free or that others have a better right to are left out; devices that others wait
        for are marked, and their holders learn that with the next heartbeat. Expired leases are respected while the
        database has been up for less than `ttl_s`, or while `is_stable` returns False because it did not answer all
        the time.
        """
        kept = dict(keep or {})
        asking = [*(device for device in devices if device not in kept), *kept]

        def claim(connection: Connection) -> list[HeldShard]:
            lease_rows.lock_soc(connection, soc)
            now_ms = self._clock(connection)
            us = {"agent": agent.name, "token": agent.token, "now_ms": now_ms}
            place = connection.execute(_ALIVE, us).first()
            if place is None:
                return []
            requests = lease_rows.requests_now(connection, now_ms)
            known = read_situation(connection, soc, now_ms, requests, only_free=True, asking=asking, keep=kept)
            shares = share_out(known.situation)
            living = self._living_of(connection, soc, now_ms)
            taking = _Taking(connection, known, living, us, place, round(ttl_s * 1000), is_stable)
            held = taking.take(shares, asking, kept)
            if len(held) < len(asking) or not asking:
                look_for_wanted(connection, known, shares)
            return held

        return self._write(claim)

    def _living_of(self, connection: Connection, soc: str, now_ms: int) -> Sequence[LivingDevice]:
        """Return the living devices of a SoC, from a cache of at most `_LIVING_S`."""
        asked_s, living = self._living.get(soc, (-_LIVING_S, []))
        if time.monotonic() - asked_s >= _LIVING_S:
            living = read_living(connection, soc, now_ms)
            self._living[soc] = time.monotonic(), living
        return living

    @cached_property
    def _living(self) -> dict[str, tuple[float, list[LivingDevice]]]:
        return {}


class _Taking(NamedTuple):
    """Steps of a claim."""

    connection: Connection
    known: KnownSoc
    living: Sequence[LivingDevice]
    us: dict[str, Any]
    """Parameters of statements: agent, token and time."""
    place: Row[Any]
    """Host and process of the agent."""
    ttl_ms: int
    is_stable: Callable[[], bool]

    def take(self, shares: Mapping[str, Share], asking: Sequence[str], keep: Mapping[str, Lease]) -> list[HeldShard]:
        """Take the devices and shards of an agent's part in the decision."""
        mine = {device: shares[device] for device in asking if device in shares and shares[device].run_id}
        free = self._free(mine, keep) if mine else set()
        shards = self._choose({device: share for device, share in mine.items() if device in free})
        held = [self._hold(device, shard, keep.get(device)) for device, shard in shards.items()]
        return self._complete([one for one in held if one is not None])

    def _free(self, mine: Mapping[str, Share], keep: Mapping[str, Lease]) -> set[str]:
        """Return the devices that are still free, locked until the end of the transaction."""
        users = [share.user for share in mine.values()]
        asked = {**self.us, "devices": list(mine), "users": users, "keep": list(keep)}
        rows = self.connection.execute(_FREE, asked).all()
        left = {row.device for row in rows if not row.is_free and row.device not in keep}
        # An agent that could not reach the database keeps its expired leases.
        if left and not lease_rows.is_stable(self.connection, self.ttl_ms, self.is_stable):
            return {row.device for row in rows} - left
        return {row.device for row in rows}

    def _choose(self, mine: Mapping[str, Share]) -> dict[str, int]:
        """Return the shard of each device."""
        of_run = Counter(share.run_id for share in mine.values() if share.shard is None)
        first: dict[str, list[int]] = {}
        for run_id, most in sorted(of_run.items()):
            asked = {"run": run_id, "soc": self.known.situation.soc, "most": most}
            first[run_id] = list(reversed(self.connection.scalars(_FIRST, asked).all()))
        chosen = {}
        for device, share in mine.items():
            if share.shard is not None:
                chosen[device] = share.shard
            elif first[share.run_id]:
                chosen[device] = first[share.run_id].pop()
        return chosen

    def _hold(self, device: str, shard: int, keep: Lease | None) -> tuple[Row[Any], Lease] | None:
        before = self.known.leases[device]
        if keep is not None and before.fence != keep.fence:
            return None
        fence = before.fence + 1 if keep is None else keep.fence
        row = self.connection.execute(_HOLD, {**self.us, "device": device, "fence": fence, "shard": shard}).first()
        if row is None:
            return None
        lease = lease_rows.take(
            self.connection,
            before,
            fence=fence,
            token=self.us["token"],
            user=row.user_name,
            host=self.place.host,
            pid=self.place.pid,
            purpose=row.purpose,
            priority=Priority(row.priority),
            acquired_ms=self.us["now_ms"],
            expires_ms=self.us["now_ms"] + self.ttl_ms,
        )
        return row, lease

    def _complete(self, held: Sequence[tuple[Row[Any], Lease]]) -> list[HeldShard]:
        """Return shards with their remaining jobs, bundles and other devices."""
        if not held:
            return []
        jobs: dict[int, tuple[PlannedJob, ...]] = {}
        for row, _ in held:
            with reading("shard_jobs", row.id):
                jobs[row.id] = jobs_left(row.jobs, row.done)
        builds = find_builds(self.connection, {one.key for left in jobs.values() for one in left})
        failures = find_failures(self.connection, [row.id for row, _ in held])
        others = self._others({row.run_id for row, _ in held})
        return [
            HeldShard(
                id=row.id,
                run_id=row.run_id,
                jobs=jobs[row.id],
                lease=lease,
                terms=row.terms.encode(),
                others=tuple(one for one in others[row.run_id] if one != lease.device),
                builds={
                    one.key: found
                    for one in jobs[row.id]
                    if (found := failures.get((row.id, one.key)) or builds.get(one.key)) is not None
                },
            )
            for row, lease in held
        ]

    def _others(self, runs: set[str]) -> dict[str, list[str]]:
        """Return the living devices that each run may use, free or not."""
        orders = {order.run_id: order for order in self.known.situation.orders}

        def usable_of(living: Sequence[LivingDevice]) -> dict[str, list[str]]:
            return {run_id: usable(orders[run_id], living)[:_MOST_OTHERS] for run_id in runs}

        others = usable_of(self.living)
        if any(len(found) <= MOST_DEVICES for found in others.values()):
            # Without another device a failure counts against the code: devices that came a moment ago count, and so do
            # devices whose heartbeat is late because the database stood still.
            since_ms = self.us["now_ms"] if self.is_stable() else 0
            return usable_of(read_living(self.connection, self.known.situation.soc, since_ms))
        return others
