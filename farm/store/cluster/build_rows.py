"""Rows of bundles that build hosts make: asked for, made, failed, and what follows for the shards that lack them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import text

from farm.compile.protocol import BuildReply
from farm.store import values
from farm.store.cluster.part import notify
from farm.store.cluster.records import Build
from farm.store.recording import build_columns
from farm.store.statements import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import Connection, Row

    from farm.bundles.bundle import Manifest
    from farm.store.cluster.records import NewBuild, NewShard

BUILD_COLUMNS = "key, state, archive, nbytes, reply, log"

# What failed is tried again for a run that asks anew, and what is there only where it is to be made anew.
_ASK = text("""
    INSERT INTO build (key, toolchain, task, user_name, priority, position, state, agent, token, fence, held_ms, tries,
                       put_back, archive, nbytes, log, asked_ms)
    VALUES (:key, :toolchain, :task, :user, :priority, :position, 'waiting', '', '', 0, 0, 0, '{}', '', 0, '', :now_ms)
    ON CONFLICT (key) DO UPDATE SET
        toolchain = excluded.toolchain, task = excluded.task, asked_ms = excluded.asked_ms,
        user_name = CASE WHEN excluded.priority > build.priority OR build.state NOT IN ('waiting', 'held')
                         THEN excluded.user_name ELSE build.user_name END,
        position = CASE WHEN excluded.priority > build.priority OR build.state NOT IN ('waiting', 'held')
                        THEN excluded.position ELSE build.position END,
        priority = CASE WHEN build.state IN ('waiting', 'held')
                        THEN greatest(excluded.priority, build.priority) ELSE excluded.priority END,
        put_back = CASE WHEN build.state = 'failed' OR (build.state = 'built' AND :anew)
                        THEN '{}' ELSE build.put_back END,
        state = CASE WHEN build.state = 'failed' OR (build.state = 'built' AND :anew)
                     THEN 'waiting' ELSE build.state END
    RETURNING state, manifest
""")
_OFFER = text("""
    INSERT INTO build (key, toolchain, task, user_name, priority, position, state, agent, token, fence, held_ms, tries,
                       put_back, archive, nbytes, manifest, reply, log, asked_ms)
    VALUES (:key, '', '', '', 0, 0, :state, '', '', 0, 0, 0, '{}', :archive, :nbytes, :manifest, :reply, :log, :now_ms)
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, archive = excluded.archive, nbytes = excluded.nbytes, reply = excluded.reply,
        log = excluded.log, manifest = coalesce(excluded.manifest, build.manifest), agent = '', token = '',
        fence = build.fence + 1
    WHERE excluded.state = 'built' OR build.state IN ('waiting', 'held')
    RETURNING key
""")
_SATISFIED = text("DELETE FROM build_wanted WHERE key = :key AND failure IS NULL RETURNING shard, job, run_id")
_DISAPPOINTED = text("""
    UPDATE build_wanted SET failure = :failure WHERE key = :key AND failure IS NULL RETURNING shard, job, run_id
""")
# In one order everywhere, so that two who do it never wait for each other.
_LOCK_SHARDS = text("SELECT id FROM shard WHERE id = ANY(:shards) ORDER BY id FOR UPDATE")
_LESS_LACKING = text("""
    UPDATE shard SET lacking = lacking - gone.n
    FROM (SELECT id, count(*) AS n FROM unnest(CAST(:shards AS bigint[])) AS id GROUP BY id) AS gone
    WHERE shard.id = gone.id RETURNING soc, lacking, state
""")
_RECORD = text("""
    UPDATE run_job SET build_seconds = :build_seconds, cached = :cached, bundle_key = :bundle_key,
                       program_hash = :program_hash, fallback_ops = CAST(:fallback_ops AS json),
                       operators = CAST(:operators AS json)
    WHERE run_id = :run AND job_id = (SELECT id FROM job WHERE name = :job)
""")
_FOUND = text(f"SELECT {BUILD_COLUMNS} FROM build WHERE key = ANY(:keys)")  # noqa: S608 - constants
_MANIFESTS = text("SELECT key, manifest FROM build WHERE key = ANY(:keys)")
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
    """Ask for the bundles of a run that are not there, and return the keys of those that it has to wait for.

    `known` are manifests of bundles that are there, by key.
    """
    for there in sorted(built, key=lambda one: one.key):
        # Another run may wait for it.
        if offer(connection, there, known.get(there.key), now_ms):
            settle(connection, there, known.get(there.key))
    whose = text("SELECT user_name, priority FROM run_order WHERE run_id = :run")
    user, priority = connection.execute(whose, {"run": run_id}).one()
    lacking: set[str] = set()
    manifests = _manifests(connection, [one.key for one in built])
    for build in sorted(builds, key=lambda one: one.key):
        asked = {
            "key": values.clean(build.key, values.KEY_LIMIT),
            "toolchain": values.clean(build.toolchain, values.KEY_LIMIT),
            "task": msgspec.json.encode(build).decode(),
            "user": user,
            "priority": priority,
            "position": build.position,
            "anew": build.anew,
            "now_ms": now_ms,
        }
        found = connection.execute(_ASK, asked).one()
        if found.state in ("waiting", "held"):
            lacking.add(build.key)
        else:
            manifests[build.key] = found.manifest
    made = [(one.job.id, one.key) for shard in shards for one in shard.jobs if manifests.get(one.key)]
    _record(connection, [(run_id, job, key, manifests[key], True) for job, key in made])
    return lacking


def _manifests(connection: Connection, keys: Sequence[str]) -> dict[str, Any]:
    """Return what is recorded of bundles with every run that asks for them, by key."""
    found: dict[str, Any] = {}
    for part in chunks(sorted(set(keys))):
        found.update((row.key, row.manifest) for row in connection.execute(_MANIFESTS, {"keys": part}))
    return found


def offer(connection: Connection, build: Build, manifest: Manifest | None, now_ms: int) -> bool:
    """Write a bundle that somebody but a build host has made, or failed to; False where that is no news."""
    offered = {
        **outcome_columns(build),
        "key": values.clean(build.key, values.KEY_LIMIT),
        "manifest": _manifest_json(build, manifest),
        "now_ms": now_ms,
    }
    return connection.scalar(_OFFER, offered) is not None


def outcome_columns(build: Build) -> dict[str, Any]:
    """Return the columns that say how a bundle came to be."""
    return {
        "state": build.state,
        "archive": build.archive,
        "nbytes": build.nbytes,
        "reply": None if build.reply is None else msgspec.json.encode(build.reply).decode(),
        "log": values.clean_log(build.log),
    }


def settle(connection: Connection, build: Build, manifest: Manifest | None) -> None:
    """Let the shards that lack a bundle know that it is there, or that there will be none."""
    key = values.clean(build.key, values.KEY_LIMIT)
    if build.state == "built":
        found = connection.execute(_SATISFIED, {"key": key}).all()
        if manifest is not None:
            cached = build.reply is None or not build.reply.seconds
            facts = manifest_facts(build, manifest)
            _record(connection, [(row.run_id, row.job, key, facts, cached) for row in found])
    else:
        failure = msgspec.json.encode(build).decode()
        found = connection.execute(_DISAPPOINTED, {"key": key, "failure": failure}).all()
    shards = [row.shard for row in found]
    if shards:
        connection.execute(_LOCK_SHARDS, {"shards": shards})
        changed = connection.execute(_LESS_LACKING, {"shards": shards}).all()
        notify(connection, {f"work {row.soc}" for row in changed if not row.lacking and row.state == "waiting"})


def find_builds(connection: Connection, keys: Iterable[str]) -> dict[str, Build]:
    """Return by key what is known of bundles."""
    found: dict[str, Build] = {}
    for part in chunks(sorted(set(keys))):
        found.update((row.key, build_of_row(row)) for row in connection.execute(_FOUND, {"keys": part}))
    return found


def find_failures(connection: Connection, shards: Sequence[int]) -> dict[tuple[int, str], Build]:
    """Return by shard and key the bundles of which shards were told that there will be none, as they were told."""
    told = connection.execute(_FAILURES, {"shards": list(shards)})
    return {(row.shard, row.key): msgspec.json.decode(row.failure, type=Build) for row in told}


def build_of_row(row: Row[Any]) -> Build:
    """Return a row of `build` as others find it."""
    reply = None if row.reply is None else msgspec.json.decode(row.reply, type=BuildReply)
    return Build(row.key, row.state, row.archive, row.nbytes, reply, row.log)


def manifest_facts(build: Build, manifest: Manifest) -> dict[str, Any]:
    """Return what is recorded of a bundle with every run that asks for it."""
    return {
        "seconds": build.reply.seconds if build.reply else 0.0,
        "fallback_ops": manifest.fallback_ops,
        "operators": manifest.operators,
        "program": manifest.program,
    }


def _manifest_json(build: Build, manifest: Manifest | None) -> str | None:
    return None if manifest is None else msgspec.json.encode(manifest_facts(build, manifest)).decode()


def _record(connection: Connection, made: Sequence[tuple[str, str, str, Mapping[str, Any], bool]]) -> None:
    """Record how bundles of planned jobs came to be: run, job, key, what the manifest says, whether it was there."""
    planned = []
    for run_id, job, key, facts, cached in sorted(made, key=lambda one: one[:2]):
        columns = build_columns(facts["seconds"], key, facts["fallback_ops"], facts["operators"], facts["program"])
        for name in ("fallback_ops", "operators"):
            columns[name] = msgspec.json.encode(columns[name]).decode()
        planned.append({**columns, "run": run_id, "job": job, "cached": cached})
    if planned:
        connection.execute(_RECORD, planned)
