"""Bundles that build hosts make: jobs of Procrastinate, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import text

from farm.compile.protocol import BuildReply
from farm.errors import LeaseLostError
from farm.store import values
from farm.store.cluster.build_rows import drop_unwanted, find_builds, manifest_facts, offer, outcome_columns, settle
from farm.store.cluster.part import ClusterPart, notify
from farm.store.cluster.records import Build, HeldBuild, NewBuild
from farm.store.cluster.unreadable import reading
from farm.store.messages.install import ensure_messages
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import Connection

    from farm.bundles.bundle import Manifest

# A trigger of table `build` makes and removes the jobs (`farm/store/messages/functions.sql`).
_WORKER = text("SELECT worker_id FROM procrastinate_register_worker_v1()")
_NO_WORKER = text("SELECT procrastinate_unregister_worker_v1(:worker)")
_BEAT = text("SELECT procrastinate_update_heartbeat_v1(id) FROM unnest(CAST(:workers AS bigint[])) AS id")
_FETCH = text("""
    SELECT job.id, job.attempts, job.args ->> 'key' AS key FROM procrastinate_fetch_job_v2(
        ARRAY(SELECT CAST('build:' || md5(one) AS varchar) FROM unnest(CAST(:toolchains AS text[])) AS one), :worker
    ) AS job
""")
# The same bundle may be of a cancelled run and of an open one.
_IS_WANTED = """
    EXISTS (SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
            WHERE build_wanted.key = {key} AND failure IS NULL AND run_order.state = 'open')
"""
_TASK = text(f"""
    SELECT task, put_back FROM build WHERE key = :key AND state = 'waiting' AND {_IS_WANTED.format(key="build.key")}
    FOR UPDATE OF build
""")  # noqa: S608 - a constant
_UNWANTED = text(f"""
    SELECT key FROM unnest(CAST(:keys AS text[])) AS made (key) WHERE NOT {_IS_WANTED.format(key="made.key")}
""")  # noqa: S608 - a constant
_END_JOB = text("SELECT farm_end_build(:job, :attempt, :again)")
# A bundle that no run wants is recorded all the same. The bundle of another worker stays as it is.
_ENDED = text("""
    UPDATE build SET state = :state, archive = :archive, nbytes = :nbytes, reply = :reply, log = :log,
                     manifest = CAST(:manifest AS json)
    WHERE key = :key AND (state = 'waiting' OR (state = 'failed' AND :state = 'built')) RETURNING key
""")
_PUT_BACK = text("""
    UPDATE build SET put_back =
        CAST(CAST(put_back AS jsonb) || jsonb_build_object(CAST(:host AS text), CAST(:why AS text)) AS json)
    WHERE key = :key RETURNING put_back
""")
# Hosts that are alive, offer its toolchain and have not given it up.
_OTHERS = text("""
    SELECT count(*) FROM agent
    WHERE NOT has_left AND expires_ms > :now_ms AND jsonb_exists(CAST(facts AS jsonb) -> 'toolchains', :toolchain)
      AND name <> ALL(:tried)
""")
_GIVE_UP = text("""
    UPDATE build SET state = 'failed', reply = :reply WHERE key = :key AND state = 'waiting' RETURNING key
""")


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
        """Return the first bundle that a worker of `host` is to make; None where there is none.

        Raises StoreError also for a worker that was taken for dead meanwhile.
        """
        asked = {"worker": worker, "toolchains": list(toolchains)}

        def take(connection: Connection) -> HeldBuild | None:
            refused, found = [], None
            while found is None and (job := connection.execute(_FETCH, asked).one()).id is not None:
                row = connection.execute(_TASK, {"key": job.key}).first()
                if row is None:
                    _end_job(connection, job.id, job.attempts)
                elif host in row.put_back:
                    refused.append(job)
                else:
                    found = HeldBuild(_read_task(job.key, row.task), job.id, job.attempts)
            for job in refused:
                _end_job(connection, job.id, job.attempts, again=True)
            return found

        return self._write(take)

    def built(self, held: HeldBuild, build: Build, manifest: Manifest | None = None) -> None:
        """Record that a bundle is made and in the artifacts' store, also with every run that asked for it.

        Raises LeaseLostError where another worker has had its job meanwhile.
        """
        facts = None if manifest is None else msgspec.json.encode(manifest_facts(build, manifest)).decode()
        self._end(held, msgspec.structs.replace(build, state="built"), facts, manifest)

    def failed(self, held: HeldBuild, build: Build) -> None:
        """Record that a bundle cannot be made, and tell those who asked for it so far. Raises LeaseLostError."""
        self._end(held, msgspec.structs.replace(build, state="failed"), None, None)

    def put_back_build(self, held: HeldBuild, host: str, *, why: str, tried: bool = True) -> None:
        """Let another make a bundle: its job waits again.

        `tried`: this host does not get the job again. Without another living host of its toolchain the build failed, as
        infrastructure, for the reasons of all that tried. Raises LeaseLostError.
        """
        key, reason = held.task.key, one_line(values.clean(why), 500)

        def change(connection: Connection) -> None:
            hosts: dict[str, str] = {}
            if tried:
                hosts = connection.scalar(_PUT_BACK, {"key": key, "host": host, "why": reason}) or {}
            others = {"now_ms": self._clock(connection), "toolchain": held.task.toolchain, "tried": list(hosts)}
            again = not tried or bool(connection.scalar(_OTHERS, others))
            if not _end_job(connection, held.job, held.attempt, again=again):
                raise _lost(key)
            if again:
                drop_unwanted(connection, [key])
                notify(connection, [f"build {held.task.toolchain}"])
            else:
                give_up(connection, key, hosts)

        self._database.write(change)

    def add_built(self, build: Build, manifest: Manifest | None = None) -> bool:
        """Record a bundle that somebody else made, or failed to make, and tell whether that was news."""

        def change(connection: Connection) -> bool:
            manifests = {} if manifest is None else {build.key: manifest}
            is_new = bool(offer(connection, [build], manifests, self._clock(connection)))
            if is_new:
                settle(connection, [build], manifests)
            return is_new

        return self._database.write(change)

    def build_of(self, keys: Iterable[str]) -> dict[str, Build]:
        """Return by key what is known of bundles."""
        wanted = list(keys)
        with self._database.reading() as connection:
            return find_builds(connection, wanted)

    def _end(self, held: HeldBuild, build: Build, facts: str | None, manifest: Manifest | None) -> None:
        def change(connection: Connection) -> None:
            if not _end_job(connection, held.job, held.attempt):
                raise _lost(held.task.key)
            outcome = {**outcome_columns(build), "key": held.task.key, "manifest": facts}
            if connection.scalar(_ENDED, outcome) is not None:
                settle(connection, [build], {} if manifest is None else {build.key: manifest})

        self._database.write(change)


def _read_task(key: str, task: str) -> NewBuild:
    with reading("build", key):
        found = msgspec.json.decode(task, type=NewBuild)
        if found.key != key:
            raise ValueError(f"it is of bundle {found.key[:16]}")
        return found


def _end_job(connection: Connection, job: int, attempt: int, *, again: bool = False) -> bool:
    """End a job, or put it back; False where another worker has had it meanwhile."""
    return bool(connection.scalar(_END_JOB, {"job": job, "attempt": attempt, "again": again}))


def give_up(connection: Connection, key: str, tried: dict[str, str]) -> None:
    """Let a bundle that waits fail as infrastructure: `tried` says why each host could not make it."""
    why = one_line("; ".join(f"{host}: {why}" for host, why in sorted(tried.items())), 2000)
    reply = BuildReply(key, ok=False, seconds=0.0, reason=why, infra=True)
    if connection.scalar(_GIVE_UP, {"key": key, "reply": msgspec.json.encode(reply).decode()}) is not None:
        settle(connection, [Build(key, "failed", reply=reply)], {})


def _lost(key: str) -> LeaseLostError:
    return LeaseLostError(f"bundle {key[:16]} is not this agent's to make any more: what it made is not recorded")
