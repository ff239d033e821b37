"""Bundles of build hosts: requested, built or failed, with the effects on the waiting shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, TextClause, text

from farm.base.errors import LeaseLostError, UnreadableRowError
from farm.base.text import one_line
from farm.builds.compile.protocol import BuildReply
from farm.store import values
from farm.store.cluster.part import REFUSED_BY, ClusterPart, reading
from farm.store.cluster.records import Build, HeldBuild, NewBuild, NewShard
from farm.store.messages.messages import ensure_messages
from farm.store.statements import chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from farm.builds.bundles.bundle import Manifest

# Bundles per statement: each has kilobytes of text.
_PORTION = 500

# A new request repeats a failed build, and repeats a successful one only if it is to be made again. All requests take
# rows in the same order, so that two of them never wait for each other.
_ASK = text("""
    INSERT INTO build (key, toolchain, task, user_name, priority, position, state, put_back, archive, nbytes, log,
                       asked_ms)
    SELECT asked.key, asked.toolchain, asked.task, run_order.user_name, run_order.priority, asked.position,
           CASE WHEN asked.anew THEN 'anew' ELSE 'waiting' END, '{}', '', 0, '', :now_ms
    FROM jsonb_to_recordset(CAST(:builds AS jsonb))
         AS asked (key text, toolchain text, task text, position int, anew boolean)
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
    FROM jsonb_to_recordset(CAST(:builds AS jsonb))
         AS made (key text, state text, archive text, nbytes bigint, manifest text, reply text, log text)
    ORDER BY key
    ON CONFLICT (key) DO UPDATE SET
        state = excluded.state, archive = excluded.archive, nbytes = excluded.nbytes, reply = excluded.reply,
        log = excluded.log, manifest = coalesce(excluded.manifest, build.manifest)
    WHERE (excluded.state = 'built' AND (build.state <> 'built' OR build.archive <> excluded.archive))
       OR build.state = 'waiting'
    RETURNING key
""")
# Records the same columns as `farm_apply_builds` does for a bundle built on request.
_RECORD_BUILT = text("""
    UPDATE run_job SET build_seconds = CAST(manifest ->> 'seconds' AS float8), cached = true, bundle_key = build.key,
                       program_hash = nullif(left(manifest ->> 'program', 64), ''),
                       fallback_ops = manifest -> 'fallback_ops', operators = manifest -> 'operators'
    FROM unnest(CAST(:jobs AS text[]), CAST(:keys AS text[])) AS made (job, key)
    JOIN job ON job.name = made.job JOIN build ON build.key = made.key AND build.state = 'built'
    WHERE run_job.run_id = :run AND run_job.job_id = job.id AND manifest IS NOT NULL
""")
_WANT_NO_MORE = text("DELETE FROM build_wanted WHERE run_id = :run AND failure IS NULL RETURNING key")
# A build takes its user and priority from the most urgent remaining run.
_STILL_WANTED = text("""
    UPDATE build SET user_name = first.user_name, priority = first.priority
    FROM (SELECT DISTINCT ON (key) key, user_name, priority FROM build_wanted JOIN run_order USING (run_id)
          WHERE key = ANY(:keys) AND failure IS NULL AND state = 'open'
          ORDER BY key, priority DESC, submitted_ms) AS first
    WHERE build.key = first.key AND build.state = 'waiting'
""")
_DROP = text("SELECT farm_drop_builds(:keys)")
_FOUND = text("SELECT key, state, archive, nbytes, reply, log FROM build WHERE key = ANY(:keys)")
_FAILURES = text("SELECT shard, key, failure FROM build_wanted WHERE shard = ANY(:shards) AND failure IS NOT NULL")


# A trigger of table `build` makes and removes the jobs. Each write is a function (`farm/store/messages/functions.sql`):
# the login of a build host needs no right to a table.
_WORKER = text("SELECT worker_id FROM procrastinate_register_worker_v1()")
_NO_WORKER = text("SELECT procrastinate_unregister_worker_v1(:worker)")
_BEAT = text("SELECT procrastinate_update_heartbeat_v1(id) FROM unnest(CAST(:workers AS bigint[])) AS id")
_TAKE = text("SELECT * FROM farm_take_build(:worker, CAST(:toolchains AS text[]))")
# A cancelled run and an open run may request the same bundle.
_UNWANTED = text("""
    SELECT key FROM unnest(CAST(:keys AS text[])) AS made (key) WHERE NOT EXISTS (
        SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
        WHERE build_wanted.key = made.key AND failure IS NULL AND run_order.state = 'open')
""")
_END_JOB = text("SELECT farm_end_build(:job, :attempt, false)")
_RECORD = text("""
    SELECT farm_record_build(:job, :attempt, :state, :archive, :nbytes, :reply, :log, CAST(:manifest AS json))
""")
_PUT_BACK = text("SELECT farm_put_back_build(:job, :attempt, :host, :why)")
_REFUSE = text("SELECT farm_refuse_build(:job, :attempt, :why, :refused_by)")


def want_builds(
    connection: Connection,
    run_id: str,
    shards: Sequence[NewShard],
    builds: Sequence[NewBuild],
    built: Sequence[tuple[Build, Manifest | None]],
    now_ms: int,
) -> set[str]:
    """Request the missing bundles of a run, and return the keys of the bundles to wait for.

    `built` are existing bundles, with the manifests of new ones.
    """
    if builds:
        ensure_messages(connection)
    there = {build.key: (build, manifest) for build, manifest in built}
    for part in chunks([there[key] for key in sorted(there)], _PORTION):
        offer(connection, part, now_ms)
    lacking: set[str] = set()
    wanted = {build.key: build for build in builds}
    # In the order of their keys: all requests take rows in the same order.
    for portion in chunks([wanted[key] for key in sorted(wanted)], _PORTION):
        asked = [
            {
                "key": values.clean(build.key, values.KEY_LIMIT),
                "toolchain": values.clean(build.toolchain, values.KEY_LIMIT),
                "task": _json(build),
                "position": build.position,
                "anew": build.anew,
            }
            for build in portion
        ]
        found = connection.execute(_ASK, {"run": run_id, "builds": _json(asked), "now_ms": now_ms}).all()
        lacking.update(row.key for row in found if row.state in ("waiting", "anew"))
        if any(row.state == "anew" for row in found):
            connection.execute(_IS_WAITING, {"keys": [row.key for row in found]})
    made = sorted((one.job.id, one.key) for shard in shards for one in shard.jobs if one.key not in lacking)
    for pairs in chunks(made, _PORTION):
        jobs, keys = zip(*pairs, strict=True)
        connection.execute(_RECORD_BUILT, {"run": run_id, "jobs": list(jobs), "keys": list(keys)})
    return lacking


def _json(facts: object) -> str:
    return msgspec.json.encode(facts).decode()


def offer(connection: Connection, built: Sequence[tuple[Build, Manifest | None]], now_ms: int) -> set[str]:
    """Write bundles built by a client, with their manifests, or its failures; return the keys of changed rows.

    A trigger of table `build` notifies the waiting shards (`farm/store/messages/functions.sql`).
    """
    offered = [
        {"key": values.clean(build.key, values.KEY_LIMIT), **_outcome(build, manifest)} for build, manifest in built
    ]
    return set(connection.scalars(_OFFER, {"builds": _json(offered), "now_ms": now_ms}))


def _outcome(build: Build, manifest: Manifest | None) -> dict[str, Any]:
    """Return the columns for the outcome of a build; `manifest` has facts that every requesting run records."""
    facts = None
    if manifest is not None:
        facts = {
            "seconds": build.reply.seconds if build.reply else 0.0,
            "fallback_ops": manifest.fallback_ops,
            "operators": manifest.operators,
            "program": manifest.program,
        }
    return {
        "state": build.state,
        "archive": build.archive,
        "nbytes": build.nbytes,
        "reply": None if build.reply is None else _json(build.reply),
        "log": values.clean_log(build.log),
        "manifest": None if facts is None else _json(facts),
    }


def stop_waiting(connection: Connection, run_id: str) -> None:
    """Withdraw the requests of a run; builds without another request are dropped."""
    for keys in chunks(sorted(set(connection.scalars(_WANT_NO_MORE, {"run": run_id}))), _PORTION):
        connection.execute(_STILL_WANTED, {"keys": keys})
        connection.execute(_DROP, {"keys": keys})


def find_builds(connection: Connection, keys: Iterable[str]) -> dict[str, Build]:
    """Return the builds that the store has, by key."""
    found = {}
    for part in chunks(sorted(set(keys))):
        for row in connection.execute(_FOUND, {"keys": part}):
            reply = None if row.reply is None else msgspec.json.decode(row.reply, type=BuildReply)
            found[row.key] = Build(row.key, row.state, row.archive, row.nbytes, reply, row.log)
    return found


def find_failures(connection: Connection, shards: Sequence[int]) -> dict[tuple[int, str], Build]:
    """Return failed builds by shard and key, as recorded for each shard at the time of the failure."""
    failures = connection.execute(_FAILURES, {"shards": list(shards)})
    return {(row.shard, row.key): msgspec.json.decode(row.failure, type=Build) for row in failures}


class BuildWork(ClusterPart):
    """Jobs of build hosts, and outcomes of builds."""

    def begin_worker(self) -> int:
        """Return a new worker of Procrastinate, for one bundle at a time; `keep_workers` sends its heartbeats."""

        def register(connection: Connection) -> int:
            ensure_messages(connection)
            return int(connection.scalar(_WORKER) or 0)

        return self._database.write(register)

    def end_worker(self, worker: int) -> None:
        """End a worker; the next repair puts its job back."""
        self._database.write(lambda connection: connection.execute(_NO_WORKER, {"worker": worker}))

    def keep_workers(self, workers: Collection[int], making: Collection[str]) -> tuple[str, ...]:
        """Send the heartbeats of workers, and return the bundles among `making` that no open run wants."""

        def keep(connection: Connection) -> tuple[str, ...]:
            connection.execute(_BEAT, {"workers": sorted(workers)})
            return tuple(connection.scalars(_UNWANTED, {"keys": sorted(making)})) if making else ()

        return self._database.write(keep)

    def take_build(self, worker: int, host: str, toolchains: Sequence[str]) -> HeldBuild | None:
        """Return the next bundle for a worker of `host` to build; None without one.

        Raises StoreError also for a worker that was considered dead meanwhile.
        """
        asked = {"worker": worker, "toolchains": list(toolchains)}

        def take(connection: Connection) -> HeldBuild | None:
            refused, found = [], None
            while found is None and (row := connection.execute(_TAKE, asked).first()) is not None:
                job = {"job": row.job, "attempt": row.attempt}
                if row.task is None:
                    connection.execute(_END_JOB, job)
                elif host in row.put_back:
                    refused.append({**job, "host": host, "why": row.put_back[host]})
                else:
                    try:
                        found = HeldBuild(_read_task(row.key, row.task), row.job, row.attempt)
                    except UnreadableRowError as error:
                        connection.execute(_REFUSE, {**job, "why": str(error), "refused_by": REFUSED_BY})
            for job in refused:
                connection.execute(_PUT_BACK, job)
            return found

        return self._database.write(take)

    def record_build(self, held: HeldBuild, build: Build, manifest: Manifest | None = None) -> None:
        """Record a failed build, or a built bundle in the artifacts' store, also with every run that requested it.

        Raises LeaseLostError if another worker got its job meanwhile.
        """
        self._end_job(held, _RECORD, _outcome(build, manifest))

    def put_back_build(self, held: HeldBuild, host: str, *, why: str, tried: bool = True) -> None:
        """Put the job of a bundle back for another host.

        With `tried`, this host does not get the job again; without another living host of its toolchain the build has
        failed, as infrastructure, with the reasons of all hosts that tried. Raises LeaseLostError.
        """
        reason = one_line(values.clean(why), 500) if tried else ""
        self._end_job(held, _PUT_BACK, {"host": host, "why": reason})

    def add_built(self, build: Build, manifest: Manifest | None = None) -> bool:
        """Record a bundle built outside of build hosts, or its failure, and return whether the row changed."""
        return self._database.write(lambda one: bool(offer(one, [(build, manifest)], self._clock(one))))

    def build_of(self, keys: Iterable[str]) -> dict[str, Build]:
        """Return the builds that the store has, by key."""
        wanted = list(keys)
        with self._database.reading() as connection:
            return find_builds(connection, wanted)

    def _end_job(self, held: HeldBuild, statement: TextClause, columns: dict[str, Any]) -> None:
        """Execute a statement that ends the job of a bundle.

        Raises LeaseLostError if another worker got the job meanwhile.
        """
        job = {"job": held.job, "attempt": held.attempt}
        if not self._database.write(lambda connection: connection.scalar(statement, {**job, **columns})):
            raise LeaseLostError(
                f"bundle {held.task.key[:16]} is no longer assigned to this agent: its result is not recorded"
            )


def _read_task(key: str, task: str) -> NewBuild:
    with reading("build", key):
        found = msgspec.json.decode(task, type=NewBuild)
        if found.key != key:
            raise ValueError(f"it is of bundle {found.key[:16]}")
        return found
