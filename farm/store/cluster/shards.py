"""Shards of submitted runs: their rows, their assignment to devices, and the results of their jobs."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, text

from farm.base.errors import LeaseLostError
from farm.policy.retries import MOST_DEVICES, avoided, is_failure
from farm.policy.sharing import share_out
from farm.policy.situation import Lease, LivingDevice, Share, usable
from farm.store import rows, schema, values
from farm.store.cluster.builds import find_builds, find_failures
from farm.store.cluster.part import ClusterPart, notify, reading
from farm.store.cluster.records import AgentId, HeldShard, NewShard, PlannedJob, ShardResult
from farm.store.leases import rows as lease_rows
from farm.store.leases.situations import KnownSoc, look_for_wanted, read_living, read_situation
from farm.store.rows import bounded

# Insertion of shards, and encoding of their jobs.


# Level of zlib: the tolerances of jobs, kilobytes that repeat within a suite, shrink to a twentieth in a millisecond.
_LEVEL = 1

# Earlier agents died during jobs that are done now.
_DONE = text("""
    WITH noted AS (UPDATE shard_jobs SET done = :done, next_job = :next_job WHERE shard = :shard)
    UPDATE shard SET remaining = :left, tries = 0, state = CASE WHEN :left = 0 THEN 'ended' ELSE state END
    WHERE id = :shard
""")
WAIT_AGAIN = """
    UPDATE shard SET state = CASE WHEN run_order.state = 'open' THEN 'waiting' ELSE 'ended' END, device = '',
                     agent = '', token = '', why = :why
    FROM run_order WHERE run_order.run_id = shard.run_id AND shard.state = 'held'
"""
"""Begin of statements that release held shards; parameter: why."""


def insert_shards(
    connection: Connection, run_id: str, shards: Sequence[NewShard], lacking: Collection[str] = (), now_ms: int = 0
) -> list[int]:
    """Insert waiting shards, and return their ids; `lacking` are the keys of bundles that are not built yet."""
    if not shards:
        return []
    shard = schema.shard
    rows = [
        {
            "run_id": run_id,
            "soc": values.clean(new.soc, values.SOC_LIMIT),
            "position": new.position,
            "expected_s": new.expected_s,
            "lacking": sum(key in lacking for _, key in keys_of(new)),
            "avoid": [values.clean(device, values.NAME_LIMIT) for device in new.avoid],
            "retry": any(one.history for one in new.jobs),
            "state": "waiting",
            **dict.fromkeys(("device", "agent", "token", "why"), ""),
            **dict.fromkeys(("fence", "tries"), 0),
            "held_ms": now_ms,
            "remaining": len(new.jobs),
        }
        for new in shards
    ]
    inserted = shard.insert().returning(shard.c.id, sort_by_parameter_order=True)
    ids = list(connection.scalars(inserted, rows))
    contents = [
        {
            "shard": id_,
            "names": encode_names(one.job.id for one in new.jobs),
            "done": "[]",
            "next_job": new.jobs[0].job.id if new.jobs else "",
            "jobs": encode_jobs(new.jobs),
        }
        for id_, new in zip(ids, shards, strict=True)
    ]
    connection.execute(schema.shard_jobs.insert(), contents)
    return ids


def keys_of(new: NewShard) -> list[tuple[str, str]]:
    """Return the bundles of a shard as (name, key): its jobs by name, then its other needs as `needs N`."""
    jobs = [(one.job.id, one.key) for one in new.jobs]
    return jobs + [(f"needs {n}", key) for n, key in enumerate(new.needs)]


def encode_jobs(jobs: Iterable[PlannedJob]) -> bytes:
    """Return jobs encoded for their column."""
    return zlib.compress(msgspec.json.encode(list(jobs)), _LEVEL)


def decode_jobs(jobs: bytes) -> tuple[PlannedJob, ...]:
    """Return the jobs decoded from their column."""
    return msgspec.json.decode(zlib.decompress(jobs), type=tuple[PlannedJob, ...])


def encode_names(names: Iterable[str]) -> str:
    """Return names of jobs encoded for their column."""
    return msgspec.json.encode(list(names)).decode()


def decode_names(names: str) -> list[str]:
    """Return names of jobs decoded from their column."""
    return msgspec.json.decode(names, type=list[str])


def jobs_left(jobs: bytes, done: str) -> tuple[PlannedJob, ...]:
    """Return the jobs of a shard without a result."""
    ended = set(decode_names(done))
    return tuple(one for one in decode_jobs(jobs) if one.job.id not in ended)


def note_done(connection: Connection, shard: int, done: Iterable[str], left: Sequence[str]) -> None:
    """Note the jobs of a shard with a result and the jobs `left`; without any left it ends."""
    noted = {"shard": shard, "done": encode_names(done), "next_job": left[0] if left else "", "left": len(left)}
    connection.execute(_DONE, noted)


# Assignment of shards to devices, with the leases: one decision at a time per SoC, under the lock of the SoC.


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
        us = {name: self.us[name] for name in ("token", "now_ms")}
        return row, lease_rows.take(self.connection, before, row, self.place, fence=fence, ttl_ms=self.ttl_ms, **us)

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


# Results of the jobs of shards, and shards that end or are put back.


# Seconds between two hints about results of a run: commits with a notification wait for each other, and followers look
# about every second by themselves.
_NOTIFY_S = 0.5

_LEASES = text("""
    UPDATE lease SET expires_ms = CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint) + :ttl_ms
    WHERE device = ANY(:devices) AND token = :token RETURNING device, fence
""")
_SHARDS = text("""
    SELECT id, run_id, soc, position, device, fence, names, done
    FROM shard JOIN shard_jobs ON shard_jobs.shard = shard.id
    WHERE id = ANY(:shards) AND state = 'held' AND token = :token ORDER BY id FOR UPDATE OF shard
""")
_JOBS_OF = text("SELECT jobs, done FROM shard_jobs WHERE shard = :shard")
_FAILED = text("""
    UPDATE run_order SET failures = failures + :n WHERE run_id = :run RETURNING failures, most_failures
""")
_PUT_BACK = text(f"""
    {WAIT_AGAIN} AND shard.id = :shard AND shard.token = :token AND shard.fence = :fence RETURNING shard.soc
""")
_CHANGE = text("""
    WITH changed AS (
        UPDATE shard_jobs SET names = :names, next_job = :next_job, jobs = :jobs WHERE shard = :shard
    )
    UPDATE shard SET remaining = :left WHERE id = :shard
""")
_GIVE_BACK = text("""
    UPDATE lease SET token = '', expires_ms = 0, wanted_by = ''
    WHERE device = :device AND fence = :fence AND token = :token
""")


class ShardResults(ClusterPart):
    """Recording by agents."""

    def record(self, agent: AgentId, results: Sequence[ShardResult], *, ttl_s: float) -> dict[int, str]:
        """Record results, renew their leases for `ttl_s`, and return the reasons of refusals by index in `results`.

        A result is refused, without a record, if the agent no longer holds its shard under its fence, or if its job
        has a result already. A job that another device has to try becomes a shard of its own; a shard without a job
        left ends.
        """

        def write(connection: Connection) -> dict[int, str]:
            ours = {"token": agent.token, "devices": sorted({result.device for result in results})}
            renewed = connection.execute(_LEASES, {**ours, "ttl_ms": round(ttl_s * 1000)})
            fences = {row.device: row.fence for row in renewed}
            asked = {"shards": sorted({result.shard for result in results}), "token": agent.token}
            shards = {row.id: _OpenShard(row) for row in connection.execute(_SHARDS, asked)}
            refused: dict[int, str] = {}
            for number, result in enumerate(results):
                shard = shards.get(result.shard)
                problem = _why_refused(result, shard, fences.get(result.device))
                if problem or shard is None:
                    refused[number] = problem
                else:
                    shard.take(result)
            taken = [shard for shard in shards.values() if shard.taken]
            for shard in taken:
                attempts = [
                    (bounded(attempt), artifacts)
                    for result in shard.taken
                    for attempt, artifacts in result.attempts_with_artifacts
                ]
                rows.insert_attempts(connection, shard.row.run_id, attempts)
            self._settle(connection, taken)
            return refused

        return self._write(write)

    def put_back(
        self, agent: AgentId, shard: int, fence: int, *, why: str, jobs: Sequence[PlannedJob] | None = None
    ) -> None:
        """Put the rest of a shard back for another device; `jobs` are the agent's remaining jobs with its knowledge.

        The shard of a cancelled run ends. A job that the agent counts as done but whose result was refused, for a lost
        lease, remains too. Raises LeaseLostError if another agent has the shard.
        """
        ours = {"shard": shard, "token": agent.token, "fence": fence}

        def change(connection: Connection) -> None:
            soc = connection.scalar(_PUT_BACK, {**ours, "why": values.clean(why)})
            if soc is None:
                raise LeaseLostError(f"shard {shard} is no longer this agent's")
            if jobs is not None:
                newer = {one.job.id: one for one in jobs}
                row = connection.execute(_JOBS_OF, {"shard": shard}).one()
                with reading("shard_jobs", shard):
                    done, stored = set(decode_names(row.done)), decode_jobs(row.jobs)
                every = [newer.pop(one.job.id, one) for one in stored]
                every += newer.values()
                left = [one.job.id for one in every if one.job.id not in done]
                names = encode_names(one.job.id for one in every)
                changed = {"shard": shard, "jobs": encode_jobs(every), "names": names}
                connection.execute(_CHANGE, {**changed, "next_job": left[0] if left else "", "left": len(left)})
            notify(connection, [f"work {soc}"])

        self._write(change)

    def release(self, agent: AgentId, leases: Iterable[Lease]) -> None:
        """Give devices back, except devices that the agent has lost."""
        ours = [
            {"device": lease.device, "fence": lease.fence, "token": agent.token}
            for lease in sorted(leases, key=lambda lease: lease.device)
        ]
        if ours:
            self._database.write(lambda connection: connection.execute(_GIVE_BACK, ours))

    def _settle(self, connection: Connection, shards: Sequence[_OpenShard]) -> None:
        """Record done jobs, make shards of jobs that another device has to try, and count failures."""
        hints = set()
        # A shard that ends locks its run: every transaction locks runs in one order.
        for shard in sorted(shards, key=lambda shard: shard.row.run_id):
            run_id, left = shard.row.run_id, shard.left
            if any(result.repeat for result in shard.taken):
                with reading("shard_jobs", shard.row.id):
                    jobs = decode_jobs(connection.execute(_JOBS_OF, {"shard": shard.row.id}).scalar_one())
                retries = list(shard.retries(jobs))
                insert_shards(connection, run_id, retries, now_ms=self._clock(connection))
                hints.add(f"work {shard.row.soc}")
            count = shard.failures
            counted = connection.execute(_FAILED, {"run": run_id, "n": count}).one() if count else None
            if counted and counted.most_failures is not None and counted.failures >= counted.most_failures:
                # The hint makes agents send a heartbeat, whose answer stops their shards of the run.
                hints.add(f"cancel {run_id}")
            # The shard comes last: the end of the last one finishes the run.
            note_done(connection, shard.row.id, shard.done, left)
            if self._may_notify(run_id):
                hints.add(f"result {run_id}")
        notify(connection, hints)

    def _may_notify(self, run_id: str) -> bool:
        if time.monotonic() - self._notified.get(run_id, -_NOTIFY_S) < _NOTIFY_S:
            return False
        self._notified[run_id] = time.monotonic()
        return True

    @cached_property
    def _notified(self) -> dict[str, float]:
        """Time of the last hint about results of each run (`time.monotonic`)."""
        return {}


class _OpenShard:
    """Shard while its results are recorded."""

    def __init__(self, row: Row[Any]) -> None:
        """Raises UnreadableRowError."""
        self.row = row
        with reading("shard_jobs", row.id):
            self.done, self._names = decode_names(row.done), decode_names(row.names)
        self.taken: list[ShardResult] = []

    @property
    def left(self) -> list[str]:
        done = set(self.done)
        return [name for name in self._names if name not in done]

    @property
    def failures(self) -> int:
        return sum(
            not result.repeat and bool(result.attempts) and is_failure(result.attempts[-1]) for result in self.taken
        )

    def take(self, result: ShardResult) -> None:
        self.done.append(result.job_id)
        self.taken.append(result)

    def retries(self, jobs: Iterable[PlannedJob]) -> Iterable[NewShard]:
        """Return shards for the jobs that another device has to try, with the results so far."""
        of_name = {one.job.id: one for one in jobs}
        for result in self.taken:
            if result.repeat:
                job = msgspec.structs.replace(of_name[result.job_id], history=result.repeat)
                avoid = avoided(result.repeat, result.device)
                yield NewShard(self.row.soc, (job,), job.expected_s, self.row.position, avoid)


def _why_refused(result: ShardResult, shard: _OpenShard | None, fence: int | None) -> str:
    if shard is None or shard.row.fence != result.fence or shard.row.device != result.device:
        return f"shard {result.shard} is no longer this agent's under fence {result.fence}"
    if fence != result.fence:
        return f"the lease {result.fence} of {result.device} is over"
    return "recorded already" if result.job_id in shard.done else ""
