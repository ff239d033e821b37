"""What devices found out about the jobs of a shard, and shards that end or are put back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import text

from farm.errors import LeaseLostError
from farm.results.attempt import Verdict
from farm.store import rows, values
from farm.store.cluster.part import ClusterPart, notify
from farm.store.cluster.records import NewShard, ShardJob, ShardResult
from farm.store.cluster.shard_rows import (
    END_WAITING,
    decode_jobs,
    decode_names,
    encode_jobs,
    encode_names,
    insert_shards,
    next_job,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Row

    from farm.store.cluster.records import AgentId
    from farm.store.leases.rules import Lease

# Commits that notify wait for each other: followers look every second or so by themselves.
_TELL_S = 0.5

_LEASES = text("""
    UPDATE lease SET expires_ms = :expires_ms WHERE device = ANY(:devices) AND token = :token
    RETURNING device, fence
""")
_SHARDS = text("""
    SELECT id, run_id, soc, position, expected_s, device, fence, avoid, done, jobs
    FROM shard JOIN shard_jobs ON shard_jobs.shard = shard.id
    WHERE id = ANY(:shards) AND state = 'held' AND token = :token ORDER BY id FOR UPDATE OF shard
""")
_DONE = text("UPDATE shard_jobs SET done = :done, next_job = :next_job WHERE shard = :shard")
_LEFT = text("""
    UPDATE shard SET remaining = :left, state = CASE WHEN :left = 0 THEN 'ended' ELSE state END WHERE id = :shard
""")
_FAILED = text("""
    UPDATE run_order SET failures = failures + :n WHERE run_id = :run RETURNING failures, most_failures
""")
_OURS = "shard.id = :shard AND shard.state = 'held' AND shard.token = :token AND shard.fence = :fence"
_PUT_BACK = text(f"""
    UPDATE shard SET state = CASE WHEN run_order.state = 'open' THEN 'waiting' ELSE 'ended' END, device = '',
                     agent = '', token = '', why = :why
    FROM run_order WHERE run_order.run_id = shard.run_id AND {_OURS} RETURNING shard.soc
""")  # noqa: S608 - a constant
_JOBS = text("UPDATE shard_jobs SET jobs = :jobs, next_job = :next_job WHERE shard = :shard")
_NAMES = text("SELECT done FROM shard_jobs WHERE shard = :shard")
_REMAINING = text("UPDATE shard SET remaining = :left WHERE id = :shard")
_END = text(f"UPDATE shard SET state = 'ended' WHERE {_OURS}")  # noqa: S608 - a constant
_GIVE_BACK = text("""
    UPDATE lease SET token = '', expires_ms = 0, wanted_by = ''
    WHERE device = :device AND fence = :fence AND token = :token
""")
_SHARDS_OF = text("""
    SELECT id, soc, position, expected_s, lacking, state, device, agent, held_ms, why, remaining, retry
    FROM shard WHERE run_id = :run ORDER BY position, id
""")


class ShardState(msgspec.Struct, frozen=True):
    """A shard as it is now."""

    id: int
    soc: str
    position: int
    expected_s: float
    lacking: int
    state: str
    device: str
    agent: str
    held_ms: int
    why: str
    remaining: int
    """Jobs without a result."""
    retry: bool
    """It is tried again, on another device."""


class Results(ClusterPart):
    """What agents record."""

    def record(self, agent: AgentId, results: Sequence[ShardResult], *, ttl_s: float) -> dict[int, str]:
        """Record results, renew the leases that they were found under for `ttl_s`, and return why some are refused.

        By their place in `results`. One is refused where its shard is not the agent's any more under its fence, and
        where its job has a result already: nothing of it is recorded then. A job that another device is to try makes
        a shard of its own; a shard of which no job is left ends.
        """

        def write(connection: Connection) -> dict[int, str]:
            now_ms = self._clock(connection)
            devices = sorted({result.device for result in results})
            renewed = {"devices": devices, "token": agent.token, "expires_ms": now_ms + round(ttl_s * 1000)}
            fences = {row.device: row.fence for row in connection.execute(_LEASES, renewed)}
            shards = {
                row.id: _OpenShard(row)
                for row in connection.execute(
                    _SHARDS, {"shards": sorted({result.shard for result in results}), "token": agent.token}
                )
            }
            refused: dict[int, str] = {}
            for number, result in enumerate(results):
                shard = shards.get(result.shard)
                problem = _why_refused(result, shard, fences.get(result.device))
                if problem or shard is None:
                    refused[number] = problem
                    continue
                self._record_one(connection, shard.row.run_id, result)
                shard.take(result)
            self._settle(connection, [shard for shard in shards.values() if shard.taken])
            return refused

        return self._database.write(write)

    def put_back(
        self, agent: AgentId, shard: int, fence: int, *, why: str, jobs: Sequence[ShardJob] | None = None
    ) -> None:
        """Let another device have what is left of a shard; `jobs` are all of it, where they are others by now.

        Raises LeaseLostError where the shard is not the agent's any more.
        """
        ours = {"shard": shard, "token": agent.token, "fence": fence}

        def change(connection: Connection) -> None:
            soc = connection.scalar(_PUT_BACK, {**ours, "why": values.clean(why)})
            if soc is None:
                raise _lost(shard)
            if jobs is not None:
                done = set(decode_names(connection.scalar(_NAMES, {"shard": shard}) or "[]"))
                left = [one for one in jobs if one.job.id not in done]
                changed = {"shard": shard, "jobs": encode_jobs(jobs), "next_job": next_job(left)}
                connection.execute(_JOBS, changed)
                connection.execute(_REMAINING, {"shard": shard, "left": len(left)})
            notify(connection, [f"work {soc}"])

        self._database.write(change)

    def end_shard(self, agent: AgentId, shard: int, fence: int) -> None:
        """End a shard of which nothing is left to do, as of a run that was cancelled. Raises LeaseLostError."""
        ours = {"shard": shard, "token": agent.token, "fence": fence}

        def change(connection: Connection) -> None:
            if not connection.execute(_END, ours).rowcount:
                raise _lost(shard)

        self._database.write(change)

    def release(self, agent: AgentId, leases: Iterable[Lease]) -> None:
        """Give devices back; those that are not the agent's any more are left alone."""
        ours = [
            {"device": lease.device, "fence": lease.fence, "token": agent.token}
            for lease in sorted(leases, key=lambda lease: lease.device)
        ]
        if ours:
            self._database.write(lambda connection: connection.execute(_GIVE_BACK, ours))

    def shards(self, run_id: str) -> list[ShardState]:
        """Return the shards of a submitted run, in the order in which they go."""
        with self._database.reading() as connection:
            return [ShardState(**row._mapping) for row in connection.execute(_SHARDS_OF, {"run": run_id})]  # noqa: SLF001 - public in SQLAlchemy

    def _record_one(self, connection: Connection, run_id: str, result: ShardResult) -> None:
        for n, attempt in enumerate(result.attempts, 1):
            artifacts = result.artifacts if n == len(result.attempts) else ()
            rows.insert_attempt(connection, run_id, rows.bounded(attempt), None, artifacts)

    def _settle(self, connection: Connection, shards: Sequence[_OpenShard]) -> None:
        """Note which jobs are done, make shards of those that another device is to try, and count the failures."""
        failures: dict[str, int] = {}
        hints = set()
        for shard in shards:
            left = shard.left
            done = {"shard": shard.row.id, "done": encode_names(shard.done), "next_job": next_job(left)}
            connection.execute(_DONE, done)
            connection.execute(_LEFT, {"shard": shard.row.id, "left": len(left)})
            for new in shard.retries():
                insert_shards(connection, shard.row.run_id, [new], now_ms=self._clock(connection))
                hints.add(f"work {new.soc}")
            failures[shard.row.run_id] = failures.get(shard.row.run_id, 0) + shard.failures
            if self._tells(shard.row.run_id):
                hints.add(f"result {shard.row.run_id}")
        for run_id, count in sorted(failures.items()):
            counted = connection.execute(_FAILED, {"run": run_id, "n": count}).one() if count else None
            if counted and counted.most_failures is not None and counted.failures >= counted.most_failures:
                connection.execute(END_WAITING, {"run": run_id, "why": f"{counted.failures} jobs failed"})
        notify(connection, hints)

    def _tells(self, run_id: str) -> bool:
        told: dict[str, float] = self.__dict__.setdefault("_told", {})
        if time.monotonic() - told.get(run_id, -_TELL_S) < _TELL_S:
            return False
        told[run_id] = time.monotonic()
        return True


class _OpenShard:
    """A shard while results are recorded."""

    def __init__(self, row: Row[Any]) -> None:
        self.row = row
        self.done = decode_names(row.done)
        self._jobs = {one.job.id: one for one in decode_jobs(row.jobs)}
        self.taken: list[ShardResult] = []

    @property
    def left(self) -> list[ShardJob]:
        done = set(self.done)
        return [one for name, one in self._jobs.items() if name not in done]

    @property
    def failures(self) -> int:
        return sum(
            not result.repeat and bool(result.attempts) and is_failure(result.attempts[-1]) for result in self.taken
        )

    def has(self, job_id: str) -> bool:
        return job_id in self._jobs

    def take(self, result: ShardResult) -> None:
        self.done.append(result.job_id)
        self.taken.append(result)

    def retries(self) -> Iterable[NewShard]:
        for result in self.taken:
            if result.repeat:
                job = msgspec.structs.replace(self._jobs[result.job_id], history=result.repeat)
                avoid = tuple(dict.fromkeys(one.device for one in result.repeat if one.device))
                avoid = tuple(dict.fromkeys((*avoid, result.device)))
                yield NewShard(self.row.soc, (job,), job.expected_s, self.row.position, avoid)


def is_failure(attempt: Any) -> bool:
    """Tell whether an attempt counts against the most failures of a run."""
    return attempt.verdict is Verdict.FAILED and not attempt.known_issue


def _why_refused(result: ShardResult, shard: _OpenShard | None, fence: int | None) -> str:
    if shard is None or shard.row.fence != result.fence or shard.row.device != result.device:
        return f"shard {result.shard} is not this agent's any more under fence {result.fence}"
    if fence != result.fence:
        return f"the lease {result.fence} of {result.device} is over"
    if result.job_id in shard.done:
        return "recorded already"
    return "" if shard.has(result.job_id) else f"shard {result.shard} has no job {result.job_id}"


def _lost(shard: int) -> LeaseLostError:
    return LeaseLostError(f"shard {shard} is not this agent's any more")
