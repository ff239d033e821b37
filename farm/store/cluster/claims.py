"""Assignment of shards to devices, with the leases: one decision at a time per SoC, under the lock of the SoC."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, text

from farm.policy.retries import MOST_DEVICES
from farm.policy.sharing import share_out
from farm.policy.situation import Lease, LivingDevice, Priority, Share, usable
from farm.store.cluster.build_rows import find_builds, find_failures
from farm.store.cluster.part import ClusterPart, reading
from farm.store.cluster.records import AgentId, HeldShard, PlannedJob
from farm.store.cluster.shard_rows import jobs_left
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import KnownSoc, look_for_wanted, read_free, read_living

# Other devices for a second try of a failed job: age of the cached list in seconds, and their greatest number.
_LIVING_S = 3.0
_MOST_OTHERS = 16

_ALIVE = text("""
    SELECT facts FROM agent
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
            facts = connection.scalar(_ALIVE, us)
            if facts is None:
                return []
            requests = lease_rows.requests_now(connection, now_ms)
            known = read_free(connection, soc, now_ms, requests, asking=asking, keep=list(kept))
            shares = share_out(known.situation)
            place, living = msgspec.json.decode(facts, type=_HolderFacts), self._living_of(connection, soc, now_ms)
            taking = _Taking(connection, known, living, us, place, round(ttl_s * 1000), is_stable=is_stable)
            held = taking.take(shares, asking, kept)
            if len(held) < len(asking) or not asking:
                look_for_wanted(connection, known, shares)
            return held

        return self._write(claim)

    def _living_of(self, connection: Connection, soc: str, now_ms: int) -> Sequence[LivingDevice]:
        """Return the living devices of a SoC, from a cache of at most `_LIVING_S`."""
        cache: dict[str, tuple[float, list[LivingDevice]]] = self.__dict__.setdefault("_living", {})
        asked_s, living = cache.get(soc, (-_LIVING_S, []))
        if time.monotonic() - asked_s >= _LIVING_S:
            living = read_living(connection, soc, now_ms)
            cache[soc] = time.monotonic(), living
        return living


def _left(row: Row[Any]) -> tuple[PlannedJob, ...]:
    with reading("shard_jobs", row.id):
        return jobs_left(row.jobs, row.done)


class _HolderFacts(msgspec.Struct):
    """Part of an agent's facts that a lease records about its holder."""

    host: str
    pid: int


class _Taking:
    """Steps of a claim."""

    def __init__(
        self,
        connection: Connection,
        known: KnownSoc,
        living: Sequence[LivingDevice],
        us: dict[str, Any],
        place: _HolderFacts,
        ttl_ms: int,
        *,
        is_stable: Callable[[], bool],
    ) -> None:
        self._is_stable = is_stable
        self._connection, self._known, self._living, self._us, self._place = connection, known, living, us, place
        self._ttl_ms, self._expires_ms = ttl_ms, us["now_ms"] + ttl_ms

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
        asked = {**self._us, "devices": list(mine), "users": users, "keep": list(keep)}
        rows = self._connection.execute(_FREE, asked).all()
        left = {row.device for row in rows if not row.is_free and row.device not in keep}
        # An agent that could not reach the database keeps its expired leases.
        if left and not lease_rows.is_stable(self._connection, self._ttl_ms, self._is_stable):
            return {row.device for row in rows} - left
        return {row.device for row in rows}

    def _choose(self, mine: Mapping[str, Share]) -> dict[str, int]:
        """Return the shard of each device."""
        of_run = Counter(share.run_id for share in mine.values() if share.shard is None)
        first: dict[str, list[int]] = {}
        for run_id, most in sorted(of_run.items()):
            asked = {"run": run_id, "soc": self._known.situation.soc, "most": most}
            first[run_id] = list(reversed(self._connection.scalars(_FIRST, asked).all()))
        chosen = {}
        for device, share in mine.items():
            if share.shard is not None:
                chosen[device] = share.shard
            elif first[share.run_id]:
                chosen[device] = first[share.run_id].pop()
        return chosen

    def _hold(self, device: str, shard: int, keep: Lease | None) -> tuple[Row[Any], Lease] | None:
        before = self._known.leases[device]
        if keep is not None and before.fence != keep.fence:
            return None
        fence = before.fence + 1 if keep is None else keep.fence
        row = self._connection.execute(_HOLD, {**self._us, "device": device, "fence": fence, "shard": shard}).first()
        if row is None:
            return None
        lease = msgspec.structs.replace(
            before,
            fence=fence,
            token=self._us["token"],
            user=row.user_name,
            host=self._place.host,
            pid=self._place.pid,
            purpose=row.purpose,
            priority=Priority(row.priority),
            acquired_ms=self._us["now_ms"],
            expires_ms=self._expires_ms,
        )
        lease_rows.write_lease(self._connection, lease)
        return row, lease

    def _complete(self, held: Sequence[tuple[Row[Any], Lease]]) -> list[HeldShard]:
        """Return shards with their remaining jobs, bundles and other devices."""
        if not held:
            return []
        jobs = {row.id: _left(row) for row, _ in held}
        builds = find_builds(self._connection, {one.key for left in jobs.values() for one in left})
        failures = find_failures(self._connection, [row.id for row, _ in held])
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
        orders = {order.run_id: order for order in self._known.situation.orders}

        def usable_of(living: Sequence[LivingDevice]) -> dict[str, list[str]]:
            return {run_id: usable(orders[run_id], living)[:_MOST_OTHERS] for run_id in runs}

        others = usable_of(self._living)
        if any(len(found) <= MOST_DEVICES for found in others.values()):
            # Without another device a failure counts against the code: devices that came a moment ago count, and so do
            # devices whose heartbeat is late because the database stood still.
            since_ms = self._us["now_ms"] if self._is_stable() else 0
            return usable_of(read_living(self._connection, self._known.situation.soc, since_ms))
        return others
