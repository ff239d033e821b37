"""Insertion of shards, and encoding of their jobs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

import msgspec
from sqlalchemy import Connection, text

from farm.store import schema, values
from farm.store.cluster.records import NewShard, PlannedJob

# Level of zlib: the tolerances of jobs, kilobytes that repeat within a suite, shrink to a twentieth in a millisecond.
_LEVEL = 1

READ_NAMES = text("SELECT names, done FROM shard_jobs WHERE shard = :shard")
"""Parameter: shard."""
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
            "device": "",
            "fence": 0,
            "agent": "",
            "token": "",
            "held_ms": now_ms,
            "tries": 0,
            "why": "",
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
