"""Rows of the bundles of build hosts: requested, built or failed, with the effects on the waiting shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sqlalchemy import Connection, Row, text

from farm.builds.compile.protocol import BuildReply
from farm.store import values
from farm.store.cluster.records import Build, NewBuild, NewShard
from farm.store.messages.install import ensure_messages
from farm.store.statements import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from farm.builds.bundles.bundle import Manifest

# Bundles per statement: each has kilobytes of text.
_PORTION = 500

BUILD_COLUMNS = "key, state, archive, nbytes, reply, log"

# A new request repeats a failed build, and repeats a successful one only if it is to be made again. All requests take
# rows in the same order, so that two of them never wait for each other.
_ASK = text("""
    INSERT INTO build (key, toolchain, task, user_name, priority, position, state, put_back, archive, nbytes, log,
                       asked_ms)
    SELECT asked.key, asked.toolchain, asked.task, run_order.user_name, run_order.priority, asked.position,
           CASE WHEN asked.anew THEN 'anew' ELSE 'waiting' END, '{}', '', 0, '', :now_ms
    FROM unnest(CAST(:keys AS text[]), CAST(:toolchains AS text[]), CAST(:tasks AS text[]), CAST(:positions AS int[]),
                CAST(:anew AS boolean[])) AS asked (key, toolchain, task, position, anew)
    JOIN run_order ON run_order.run_id = :run
    ORDER BY asked.key
    ON CONFLICT (key) DO UPDATE SET
        toolchain = excluded.toolchain, task = excluded.task, asked_ms = excluded.asked_ms,
        user_name = CASE WHEN excluded.priority > build.priority OR build.state <> 'waiting'
                         THEN excluded.user_name ELSE build.user_name END,
        position = CASE WHEN excluded.priority > build.priority OR build.state <> 'waiting'
                        THEN excluded.position ELSE build.position END,
        priority = CASE WHEN build.state = 'waiting'
                        THEN greatest(excluded.priority, build.priority) ELSE excluded.priority END,
        put_back = CASE WHEN build.state = 'failed' OR excluded.state = 'anew' THEN '{}' ELSE build.put_back END,
        state = CASE WHEN build.state = 'failed' OR (build.state = 'built' AND excluded.state = 'anew')
                     THEN 'waiting' ELSE build.state END
    RETURNING key, state
""")
# Rows that `_ASK` has inserted as `anew`.
_IS_WAITING = text("UPDATE build SET state = 'waiting' WHERE key = ANY(:keys) AND state = 'anew'")
_OFFER = text("""
    INSERT INTO build (key, toolchain, task, user_name, priority, position, state, put_back, archive, nbytes, manifest,
                       reply, log, asked_ms)
    SELECT key, '', '', '', 0, 0, state, '{}', archive, nbytes, CAST(manifest AS json), reply, log, :now_ms
    FROM unnest(CAST(:keys AS text[]), CAST(:states AS text[]), CAST(:archives AS text[]), CAST(:sizes AS bigint[]),
                CAST(:manifests AS text[]), CAST(:replies AS text[]), CAST(:logs AS text[]))
         AS made (key, state, archive, nbytes, manifest, reply, log)
    ORDER BY key
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, archive = excluded.archive, nbytes = excluded.nbytes, reply = excluded.reply,
        log = excluded.log, manifest = coalesce(excluded.manifest, build.manifest)
    WHERE (excluded.state = 'built' AND (build.state <> 'built' OR build.archive <> excluded.archive))
       OR build.state = 'waiting'
    RETURNING key
""")
# Records the same columns as `farm_apply_builds` does for a bundle built on request.
_RECORD = text("""
    UPDATE run_job SET build_seconds = CAST(manifest ->> 'seconds' AS float8), cached = true, bundle_key = build.key,
                       program_hash = nullif(left(manifest ->> 'program', 64), ''),
                       fallback_ops = manifest -> 'fallback_ops', operators = manifest -> 'operators'
    FROM unnest(CAST(:jobs AS text[]), CAST(:keys AS text[])) AS made (job, key)
    JOIN job ON job.name = made.job JOIN build ON build.key = made.key AND build.state = 'built'
    WHERE run_job.run_id = :run AND run_job.job_id = job.id AND manifest IS NOT NULL
""")
_WANT_NO_MORE = text("""
    DELETE FROM build_wanted WHERE run_id = :run AND failure IS NULL RETURNING key
""")
# A build takes its user and priority from the most urgent remaining run.
_STILL_WANTED = text("""
    UPDATE build SET user_name = first.user_name, priority = first.priority
    FROM (SELECT DISTINCT ON (key) key, user_name, priority FROM build_wanted JOIN run_order USING (run_id)
          WHERE key = ANY(:keys) AND failure IS NULL AND state = 'open'
          ORDER BY key, priority DESC, submitted_ms) AS first
    WHERE build.key = first.key AND build.state = 'waiting'
""")
_DROP = text("SELECT farm_drop_builds(:keys)")
_FOUND = text(f"SELECT {BUILD_COLUMNS} FROM build WHERE key = ANY(:keys)")  # noqa: S608 - constants
_FAILURES = text("SELECT shard, key, failure FROM build_wanted WHERE shard = ANY(:shards) AND failure IS NOT NULL")


def want_builds(
    connection: Connection,
    run_id: str,
    shards: Sequence[NewShard],
    builds: Sequence[NewBuild],
    built: Sequence[Build],
    now_ms: int,
    known: Mapping[str, Manifest],
) -> set[str]:
    """Request the missing bundles of a run, and return the keys of the bundles to wait for.

    `known` are manifests of existing bundles, by key.
    """
    if builds:
        ensure_messages(connection)
    for there in _portions(built):
        offer(connection, there, known, now_ms)
    lacking: set[str] = set()
    for portion in _portions(builds):
        asked = {
            "run": run_id,
            "keys": [values.clean(build.key, values.KEY_LIMIT) for build in portion],
            "toolchains": [values.clean(build.toolchain, values.KEY_LIMIT) for build in portion],
            "tasks": [msgspec.json.encode(build).decode() for build in portion],
            "positions": [build.position for build in portion],
            "anew": [build.anew for build in portion],
            "now_ms": now_ms,
        }
        found = connection.execute(_ASK, asked).all()
        lacking.update(row.key for row in found if row.state in ("waiting", "anew"))
        if any(row.state == "anew" for row in found):
            connection.execute(_IS_WAITING, {"keys": asked["keys"]})
    made = sorted((one.job.id, one.key) for shard in shards for one in shard.jobs if one.key not in lacking)
    for start in range(0, len(made), _PORTION):
        jobs, keys = zip(*made[start : start + _PORTION], strict=True)
        connection.execute(_RECORD, {"run": run_id, "jobs": list(jobs), "keys": list(keys)})
    return lacking


_T = TypeVar("_T", "Build", "NewBuild")


def _portions(builds: Iterable[_T]) -> Iterator[list[_T]]:
    """Yield bundles in the order of their keys, without duplicates, in portions for one statement."""
    once = [one for _, one in sorted({one.key: one for one in builds}.items())]
    for start in range(0, len(once), _PORTION):
        yield once[start : start + _PORTION]


def offer(connection: Connection, builds: Sequence[Build], manifests: Mapping[str, Manifest], now_ms: int) -> set[str]:
    """Write bundles built by a client, or its failures; return the keys of changed rows.

    A trigger of table `build` notifies the waiting shards (`farm/store/messages/functions.sql`).
    """
    columns = [outcome_columns(build) for build in builds]
    offered = {
        "keys": [values.clean(build.key, values.KEY_LIMIT) for build in builds],
        "states": [one["state"] for one in columns],
        "archives": [one["archive"] for one in columns],
        "sizes": [one["nbytes"] for one in columns],
        "manifests": [_manifest_json(build, manifests.get(build.key)) for build in builds],
        "replies": [one["reply"] for one in columns],
        "logs": [one["log"] for one in columns],
        "now_ms": now_ms,
    }
    return set(connection.scalars(_OFFER, offered))


def outcome_columns(build: Build) -> dict[str, Any]:
    """Return the columns for the outcome of a build."""
    return {
        "state": build.state,
        "archive": build.archive,
        "nbytes": build.nbytes,
        "reply": None if build.reply is None else msgspec.json.encode(build.reply).decode(),
        "log": values.clean_log(build.log),
    }


def stop_waiting(connection: Connection, run_id: str) -> None:
    """Withdraw the requests of a run; builds without another request are dropped."""
    keys = sorted(set(connection.scalars(_WANT_NO_MORE, {"run": run_id})))
    for start in range(0, len(keys), _PORTION):
        portion = {"keys": keys[start : start + _PORTION]}
        connection.execute(_STILL_WANTED, portion)
        connection.execute(_DROP, portion)


def find_builds(connection: Connection, keys: Iterable[str]) -> dict[str, Build]:
    """Return the builds that the store has, by key."""
    found: dict[str, Build] = {}
    for part in chunks(sorted(set(keys))):
        found.update((row.key, build_of_row(row)) for row in connection.execute(_FOUND, {"keys": part}))
    return found


def find_failures(connection: Connection, shards: Sequence[int]) -> dict[tuple[int, str], Build]:
    """Return failed builds by shard and key, as recorded for each shard at the time of the failure."""
    failures = connection.execute(_FAILURES, {"shards": list(shards)})
    return {(row.shard, row.key): msgspec.json.decode(row.failure, type=Build) for row in failures}


def build_of_row(row: Row[Any]) -> Build:
    """Return the build of a row of `build`."""
    reply = None if row.reply is None else msgspec.json.decode(row.reply, type=BuildReply)
    return Build(row.key, row.state, row.archive, row.nbytes, reply, row.log)


def manifest_facts(build: Build, manifest: Manifest) -> dict[str, Any]:
    """Return the facts about a bundle that every requesting run records."""
    return {
        "seconds": build.reply.seconds if build.reply else 0.0,
        "fallback_ops": manifest.fallback_ops,
        "operators": manifest.operators,
        "program": manifest.program,
    }


def _manifest_json(build: Build, manifest: Manifest | None) -> str | None:
    return None if manifest is None else msgspec.json.encode(manifest_facts(build, manifest)).decode()
