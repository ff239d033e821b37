"""Bundles of build hosts: jobs of Procrastinate and their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, TextClause, text

from farm.base.errors import LeaseLostError, UnreadableRowError
from farm.base.text import one_line
from farm.store import values
from farm.store.cluster.build_rows import find_builds, manifest_facts, offer, outcome_columns
from farm.store.cluster.part import REFUSED_BY, ClusterPart, reading
from farm.store.cluster.records import Build, BuildState, HeldBuild, NewBuild
from farm.store.messages.install import ensure_messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from farm.builds.bundles.bundle import Manifest

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

    def built(self, held: HeldBuild, build: Build, manifest: Manifest | None = None) -> None:
        """Record a built bundle, present in the artifacts' store, also with every run that requested it.

        Raises LeaseLostError if another worker got its job meanwhile.
        """
        self._record(held, build, "built", manifest)

    def failed(self, held: HeldBuild, build: Build) -> None:
        """Record a failed build, also with every run that requested it so far. Raises LeaseLostError."""
        self._record(held, build, "failed", None)

    def put_back_build(self, held: HeldBuild, host: str, *, why: str, tried: bool = True) -> None:
        """Put the job of a bundle back for another host.

        With `tried`, this host does not get the job again; without another living host of its toolchain the build has
        failed, as infrastructure, with the reasons of all hosts that tried. Raises LeaseLostError.
        """
        reason = one_line(values.clean(why), 500) if tried else ""
        self._require(held, _PUT_BACK, {"host": host, "why": reason})

    def add_built(self, build: Build, manifest: Manifest | None = None) -> bool:
        """Record a bundle built outside of build hosts, or its failure, and return whether the row changed."""

        manifests = {} if manifest is None else {build.key: manifest}
        return self._database.write(
            lambda connection: bool(offer(connection, [build], manifests, self._clock(connection)))
        )

    def build_of(self, keys: Iterable[str]) -> dict[str, Build]:
        """Return the builds that the store has, by key."""
        wanted = list(keys)
        with self._database.reading() as connection:
            return find_builds(connection, wanted)

    def _record(self, held: HeldBuild, build: Build, state: BuildState, manifest: Manifest | None) -> None:
        facts = None if manifest is None else msgspec.json.encode(manifest_facts(build, manifest)).decode()
        self._require(held, _RECORD, {**outcome_columns(build), "state": state, "manifest": facts})

    def _require(self, held: HeldBuild, statement: TextClause, columns: dict[str, Any]) -> None:
        """Execute a statement that ends the job of a bundle.

        Raises LeaseLostError if another worker got the job meanwhile.
        """
        job = {"job": held.job, "attempt": held.attempt}
        if not self._database.write(lambda connection: connection.scalar(statement, {**job, **columns})):
            raise LeaseLostError(
                f"bundle {held.task.key[:16]} is not this agent's to make any more: what it made is not recorded"
            )


def _read_task(key: str, task: str) -> NewBuild:
    with reading("build", key):
        found = msgspec.json.decode(task, type=NewBuild)
        if found.key != key:
            raise ValueError(f"it is of bundle {found.key[:16]}")
        return found
