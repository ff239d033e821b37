"""Which shard a device gets: decided for a SoC at a time, under its lock, with the lease of the device."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import text

from farm.store.cluster.build_rows import find_builds, find_failures
from farm.store.cluster.part import ClusterPart, lock_soc, notify
from farm.store.cluster.records import HeldShard
from farm.store.cluster.shard_rows import jobs_left
from farm.store.cluster.situations import lease_of_device, read_situation
from farm.store.leases.sharing import hand_over, share_out
from farm.store.leases.situation import usable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Row

    from farm.store.cluster.records import AgentId
    from farm.store.cluster.situations import Known
    from farm.store.leases.rules import Lease
    from farm.store.leases.situation import Share

# Looking for devices that others have a better right to costs as much as giving them away.
_LOOK_S = 1.0

_ALIVE = text("""
    SELECT facts FROM agent
    WHERE name = :agent AND token = :token AND NOT has_left AND NOT is_draining AND expires_ms > :now_ms FOR SHARE
""")
# What somebody else is about to take is left to him.
_FREE = text("""
    SELECT device FROM lease WHERE device = ANY(:devices) AND (token = '' OR expires_ms <= :now_ms OR token = :token)
    ORDER BY device FOR UPDATE SKIP LOCKED
""")
_FIRST = text("""
    SELECT shard.id FROM shard JOIN run_order USING (run_id)
    WHERE shard.run_id = :run AND soc = :soc AND shard.state = 'waiting' AND lacking = 0 AND NOT retry
    ORDER BY position, shard.id LIMIT :most FOR UPDATE OF shard SKIP LOCKED
""")
# Of one device: free, or ours already where it goes on. Its reservation is looked at once more.
_TAKE = text("""
    UPDATE lease SET fence = CASE WHEN :keep THEN fence ELSE fence + 1 END, token = :token, user_name = :user,
                     host = :host, pid = :pid, purpose = :purpose, priority = :priority, acquired_ms = :now_ms,
                     expires_ms = :expires_ms, wanted_by = ''
    WHERE device = :device AND (reserved_until_ms <= :now_ms OR reserved_for = :user)
      AND CASE WHEN :keep THEN token = :token AND fence = :fence ELSE token = '' OR expires_ms <= :now_ms END
    RETURNING *
""")
_HOLD = text("""
    UPDATE shard SET state = 'held', device = :device, fence = :fence, agent = :agent, token = :token,
                     held_ms = :now_ms, why = ''
    FROM run_order, shard_jobs
    WHERE shard.id = :shard AND shard.state = 'waiting' AND run_order.run_id = shard.run_id
      AND run_order.state = 'open' AND shard_jobs.shard = shard.id
    RETURNING shard.id, shard.run_id, shard.avoid, run_order.user_name, run_order.purpose, run_order.priority,
              run_order.terms, shard_jobs.jobs, shard_jobs.done
""")
_WANTED = text("UPDATE lease SET wanted_by = :user WHERE device = :device AND token <> ''")


class Claims(ClusterPart):
    """How agents get work."""

    _looked_at: dict[str, float]

    def claim(
        self,
        agent: AgentId,
        soc: str,
        devices: Sequence[str],
        *,
        ttl_s: float,
        most: int | None = None,
        keep: Mapping[str, Lease] | None = None,
    ) -> list[HeldShard]:
        """Return what idle devices of an agent are to run now, each with the lease of its device for `ttl_s`.

        `keep` are devices that are about to end a shard: they count as free, and where they get another shard they go
        on under the fence that they have, whichever user it is of. Of all these at most `most` get something. What
        nobody may have now, and what others have a better right to, is left; devices that others wait for are marked,
        and who holds them learns it with the next heartbeat.
        """
        kept = dict(keep or {})
        asking = [device for device in devices if device not in kept] + list(kept)

        def claim(connection: Connection) -> list[HeldShard]:
            lock_soc(connection, soc)
            now_ms = self._clock(connection)
            us = {"agent": agent.name, "token": agent.token, "now_ms": now_ms}
            facts = connection.scalar(_ALIVE, us)
            if facts is None:
                return []
            known = read_situation(connection, soc, now_ms, asking=asking, keep=kept)
            taking = _Taking(connection, known, us, msgspec.json.decode(facts, type=_Place), round(ttl_s * 1000))
            shares = share_out(known.situation)
            held = taking.take(shares, asking, kept, most)
            if len(held) < max(len(asking), 1):
                self._mark(connection, known, shares)
            return held

        return self._database.write(claim)

    def _mark(self, connection: Connection, known: Known, shares: Mapping[str, Share]) -> None:
        """Mark the devices that others have a better right to, at most once a second for a SoC."""
        situation = known.situation
        waiting = sum(order.ready + len(order.retries) for order in situation.orders)
        waiting += sum(request.count for request in situation.requests)
        if waiting <= len(shares) and not known.wanted:
            return
        looked_at = self.__dict__.setdefault("_looked_at", {})
        if time.monotonic() - looked_at.get(situation.soc, -_LOOK_S) < _LOOK_S:
            return
        looked_at[situation.soc] = time.monotonic()
        mark_wanted(connection, known)


def mark_wanted(connection: Connection, known: Known) -> int:
    """Mark the devices of a SoC that others have a better right to, and return how many are newly so."""
    wanted = hand_over(known.situation)
    changed = {device: wanted.get(device, "") for device in sorted(wanted.keys() | known.wanted.keys())}
    changed = {device: user for device, user in changed.items() if known.wanted.get(device, "") != user}
    if changed:
        connection.execute(_WANTED, [{"device": device, "user": user} for device, user in changed.items()])
    news = sum(bool(user) and device not in known.wanted for device, user in changed.items())
    if news:
        notify(connection, [f"wanted {known.situation.soc}"])
    return news


class _Place(msgspec.Struct):
    """Of an agent's facts, what a lease says of its holder."""

    host: str
    pid: int


class _Taking:
    """The steps of one claim."""

    def __init__(self, connection: Connection, known: Known, us: dict[str, Any], place: _Place, ttl_ms: int) -> None:
        self._connection, self._known, self._us, self._place = connection, known, us, place
        self._now_ms: int = us["now_ms"]
        self._expires_ms = self._now_ms + ttl_ms

    def take(
        self, shares: Mapping[str, Share], asking: Sequence[str], keep: Mapping[str, Lease], most: int | None
    ) -> list[HeldShard]:
        """Take the devices and shards of an agent's part in the decision."""
        mine = {device: shares[device] for device in asking if device in shares and shares[device].run_id}
        free = set(self._connection.scalars(_FREE, {**self._us, "devices": list(mine)})) if mine else set()
        chosen = [device for device in mine if device in free][:most]
        shards = self._choose({device: mine[device] for device in chosen})
        held = [self._hold(device, shard, keep.get(device)) for device, shard in shards.items()]
        return self._complete([one for one in held if one is not None])

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
        before = self._known.leases.get(device)
        if before is None:
            return None
        fence = before.fence + 1 if keep is None else keep.fence
        nested = self._connection.begin_nested()
        row = self._connection.execute(_HOLD, {**self._us, "device": device, "fence": fence, "shard": shard}).first()
        lease = None if row is None else self._take(device, row, fence, keep)
        if row is None or lease is None:
            nested.rollback()
            return None
        nested.commit()
        return row, lease

    def _take(self, device: str, row: Row[Any], fence: int, keep: Lease | None) -> Lease | None:
        taken = self._connection.execute(
            _TAKE,
            {
                **self._us,
                "device": device,
                "fence": fence,
                "keep": keep is not None,
                "user": row.user_name,
                "host": self._place.host,
                "pid": self._place.pid,
                "purpose": row.purpose,
                "priority": row.priority,
                "expires_ms": self._expires_ms,
            },
        ).first()
        return None if taken is None or taken.fence != fence else lease_of_device(taken)

    def _complete(self, held: Sequence[tuple[Row[Any], Lease]]) -> list[HeldShard]:
        """Return what devices run with all that they need to know."""
        if not held:
            return []
        jobs = {row.id: jobs_left(row.jobs, row.done) for row, _ in held}
        builds = find_builds(self._connection, {one.key for left in jobs.values() for one in left})
        builds |= find_failures(self._connection, [row.id for row, _ in held])
        orders = {order.run_id: order for order in self._known.situation.orders}
        living = self._known.situation.devices
        return [
            HeldShard(
                id=row.id,
                run_id=row.run_id,
                user=row.user_name,
                jobs=jobs[row.id],
                lease=lease,
                terms=row.terms.encode(),
                avoid=tuple(row.avoid),
                others=tuple(one for one in usable(orders[row.run_id], living) if one != lease.device),
                builds={one.key: builds[one.key] for one in jobs[row.id] if one.key in builds},
            )
            for row, lease in held
        ]
