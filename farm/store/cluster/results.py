"""Results of the jobs of shards, and shards that end or are put back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, text

from farm.base.errors import LeaseLostError
from farm.policy.retries import avoided, is_failure
from farm.policy.situation import Lease
from farm.store import rows, values
from farm.store.cluster.part import ClusterPart, notify, reading
from farm.store.cluster.records import AgentId, NewShard, PlannedJob, ShardResult
from farm.store.cluster.shard_rows import (
    READ_NAMES,
    WAIT_AGAIN,
    decode_jobs,
    decode_names,
    encode_jobs,
    encode_names,
    insert_shards,
)
from farm.store.details import bounded

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
# Earlier agents died during jobs that are done now.
_DONE = text("""
    WITH noted AS (UPDATE shard_jobs SET done = :done, next_job = :next_job WHERE shard = :shard)
    UPDATE shard SET remaining = :left, tries = 0, state = CASE WHEN :left = 0 THEN 'ended' ELSE state END
    WHERE id = :shard
""")
_JOBS_OF = text("SELECT jobs FROM shard_jobs WHERE shard = :shard")
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
                with reading("shard_jobs", shard):
                    done = set(decode_names(connection.execute(READ_NAMES, {"shard": shard}).one().done))
                    stored = decode_jobs(connection.execute(_JOBS_OF, {"shard": shard}).scalar_one())
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
            done = {"shard": shard.row.id, "done": encode_names(shard.done), "next_job": left[0] if left else ""}
            connection.execute(_DONE, {**done, "left": len(left)})
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
