"""Submitted runs: orders with their shards and missing bundles, and reading access for people."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, text, update

from farm.base.errors import StoreError, StoreLostError
from farm.policy.situation import Priority
from farm.store import rows, schema, values
from farm.store.cluster.agents import AGENTS, agent_of
from farm.store.cluster.builds import stop_waiting, want_builds
from farm.store.cluster.part import ClusterPart, notify
from farm.store.cluster.records import Build, NewBuild, NewOrder, NewShard, Order, QueueView, RunProgress, ShardSum
from farm.store.cluster.shards import decode_jobs, insert_shards, keys_of
from farm.store.leases.rows import requests_now
from farm.store.leases.situations import read_quotas, read_situation
from farm.store.rows import case_versions, mark_skipped_rows, plan_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.builds.bundles.bundle import Manifest
    from farm.store.records import SkipReason
    from farm.suites.suite import Job


# Submitted runs: orders with their shards and missing bundles.


_COUNTED = """
    SELECT run_order.*, waiting, held, ended, lacking
    FROM run_order CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE shard.state = 'waiting') AS waiting,
               count(*) FILTER (WHERE shard.state = 'held') AS held,
               count(*) FILTER (WHERE shard.state = 'ended') AS ended, coalesce(sum(shard.lacking), 0) AS lacking
        FROM shard WHERE shard.run_id = run_order.run_id
    ) AS counts
"""
ORDER = text(f"{_COUNTED} WHERE run_order.run_id = :run")
"""Order of a run with the counts of its shards; parameter: run."""
OPEN_ORDERS = text(f"{_COUNTED} WHERE run_order.state <> 'ended' ORDER BY priority DESC, submitted_ms, run_id")
"""Orders that have not ended."""
_BUNDLES = text("UPDATE run_order SET bundles = bundles + :n WHERE run_id = :run")
_CANCEL = text("""
    UPDATE run_order SET state = 'cancelled', cancelled_by = :user
    WHERE run_id = :run AND state = 'open' AND (:may_others OR user_name = :user)
    RETURNING run_id
""")
_LOCK = text("SELECT 1 FROM run_order WHERE run_id = :run AND state <> 'ended' FOR UPDATE")
_END_WAITING = text("""
    UPDATE shard SET state = 'ended', why = CASE
        WHEN run_order.state = 'cancelled' THEN 'cancelled by ' || cancelled_by
        WHEN run_order.until_ms <= :now_ms THEN 'its time was over'
        ELSE failures || ' jobs failed' END
    FROM run_order WHERE run_order.run_id = shard.run_id AND shard.run_id = :run AND shard.state = 'waiting'
      AND (run_order.state = 'cancelled' OR until_ms <= :now_ms OR failures >= most_failures)
""")
_END = text("""
    UPDATE run_order SET state = 'ended', ended_ms = :now_ms
    WHERE run_id = :run AND state <> 'ended'
      AND NOT EXISTS (SELECT 1 FROM shard WHERE run_id = :run AND state IN ('waiting', 'held'))
    RETURNING run_id
""")
_PLAIN = ("run_id", "purpose", "state", "submitted_ms", "cancelled_by", "most_devices", "waiting", "held", "ended")
"""Columns copied unchanged into an order."""


class Orders(ClusterPart):
    """Submission, cancellation and end of runs."""

    def submit(
        self,
        order: NewOrder,
        shards: Sequence[NewShard],
        builds: Sequence[NewBuild] = (),
        built: Sequence[tuple[Build, Manifest | None]] = (),
        *,
        jobs: Sequence[Job] = (),
        skipped: Mapping[str, SkipReason | None] | None = None,
        again: bool = False,
    ) -> None:
        """Submit a begun run with all its jobs, shards and missing bundles in one transaction.

        `jobs` are planned by `Store.plan_jobs`, `skipped` marked by `Store.mark_skipped`. Build hosts make
        the missing ones of `builds`; `built` are in the artifacts' store, with manifests of the new ones. With
        `again` the run was submitted before: it gets new terms, devices and limits, and further shards. Raises
        StoreError for a run submitted before, with `again` for a run that never was.
        """
        run_id, versions = order.run_id, case_versions(jobs)

        def insert(connection: Connection) -> None:
            rows.require_run(connection, run_id)
            now_ms = self._clock(connection)
            if again:
                _reopen(connection, _row(order, now_ms))
            if jobs:
                plan_rows(connection, run_id, jobs, versions)
            if skipped:
                mark_skipped_rows(connection, run_id, skipped)
            if not again and rows.insert_new(connection, schema.run_order, _row(order, now_ms)) is None:
                raise StoreError(f"run {run_id} was submitted before")
            lacking = want_builds(connection, run_id, shards, builds, built, now_ms)
            if lacking:
                connection.execute(_BUNDLES, {"run": run_id, "n": len(lacking)})
            ids = insert_shards(connection, run_id, shards, lacking)
            wanted = [
                {"shard": shard_id, "job": job, "key": key, "run_id": run_id}
                for shard_id, new in zip(ids, shards, strict=True)
                for job, key in keys_of(new)
                if key in lacking
            ]
            if wanted:
                connection.execute(schema.build_wanted.insert(), wanted)
            ready = {f"work {new.soc}" for new in shards if not lacking.intersection(key for _, key in keys_of(new))}
            notify(connection, ready | {f"build {new.toolchain}" for new in builds if new.key in lacking})

        self._database.write(insert)

    def order(self, run_id: str) -> Order | None:
        """Return the present state of a submitted run, None for a run that was never submitted."""
        with self._database.reading() as connection:
            row = connection.execute(ORDER, {"run": run_id}).first()
            return None if row is None else order_of(row, self._clock(connection))

    def cancel(self, run_id: str, user: str, *, may_others: bool = False) -> bool:
        """Cancel a run: waiting shards never begin, running ones end at once. Return True if the run was open.

        Return False as well for a run of another user, unless `may_others`. Agents end its shards: `end_if_over`.
        """
        who = values.clean(user, values.NAME_LIMIT)

        def change(connection: Connection) -> bool:
            if connection.scalar(_CANCEL, {"run": run_id, "user": who, "may_others": may_others}) is None:
                return False
            notify(connection, [f"cancel {run_id}"])
            return True

        return self._database.write(change)

    def end_if_over(self, run_id: str) -> bool:
        """End an order without running shards and without waiting ones that may begin; return True if this call did."""
        return self._database.write(lambda connection: end_order(connection, run_id, self._clock(connection)))


def _row(order: NewOrder, now_ms: int) -> dict[str, Any]:
    """Return the columns of a new order."""
    lists = {"devices": order.devices, "labels": order.labels, "classes": order.classes}
    return {
        **{column: [values.clean(name, values.NAME_LIMIT) for name in names] for column, names in lists.items()},
        "run_id": order.run_id,
        "user_name": values.clean(order.user, values.NAME_LIMIT),
        "priority": int(order.priority),
        "purpose": values.clean(order.purpose),
        "protocol": order.protocol,
        "terms": order.terms.decode(),
        "most_devices": order.most_devices,
        "most_failures": order.most_failures,
        "failures": 0,
        "bundles": 0,
        "until_ms": None if order.budget_s is None else now_ms + round(order.budget_s * 1000),
        "state": "open",
        "cancelled_by": "",
        "submitted_ms": now_ms,
    }


def _reopen(connection: Connection, row: dict[str, Any]) -> None:
    """Open the order of a run again, with the columns `row`; its user stays. Raises StoreError without an order."""
    run_id = row.pop("run_id")
    del row["user_name"]
    of_run = schema.run_order.c.run_id == run_id
    changed = update(schema.run_order).where(of_run).values(**row, ended_ms=None).returning(schema.run_order.c.run_id)
    if connection.scalar(changed) is None:
        raise StoreError(f"run {run_id} was never submitted")
    connection.execute(update(schema.run).where(schema.run.c.id == run_id).values(finished_ms=None, exit_code=None))


def end_order(connection: Connection, run_id: str, now_ms: int) -> bool:
    """End the waiting shards of an order that may not begin; without a shard left, end the order and return True."""
    asked = {"run": run_id, "now_ms": now_ms}
    # Shards are added only under the lock of this row, or by the holder of another shard of the run.
    if connection.scalar(_LOCK, asked) is None:
        return False
    connection.execute(_END_WAITING, asked)
    if connection.scalar(_END, asked) is None:
        return False
    stop_waiting(connection, run_id)
    notify(connection, [f"ended {run_id}"])
    return True


def order_of(row: Row[Any], now_ms: int) -> Order:
    """Return the order of a row, with the counts of its shards."""
    facts = {name: row._mapping[name] for name in _PLAIN}  # noqa: SLF001 - public in SQLAlchemy
    return Order(
        **facts,
        user=row.user_name,
        priority=Priority(row.priority),
        terms=row.terms.encode(),
        devices=tuple(row.devices),
        labels=tuple(row.labels),
        classes=tuple(row.classes),
        lacking=int(row.lacking),
        is_late=row.until_ms is not None and row.until_ms <= (row.ended_ms or now_ms),
    )


# Views of the shared farm for people: progress of a run, and the queue.


# Ids are assigned before rows are visible: a smaller id may appear later, from a longer transaction. So each look
# reads so many ids again.
_OVERLAP = 2000

_ATTEMPTS = text("""
    SELECT attempt.id, job.name AS job_id, attempt.verdict, attempt.stage, attempt.reason,
           coalesce(device.serial, '') AS device, attempt.seconds, attempt.known_issue
    FROM attempt JOIN run_job ON run_job.id = attempt.run_job_id JOIN job ON job.id = run_job.job_id
    LEFT JOIN device ON device.id = attempt.device_id
    WHERE run_job.run_id = :run AND attempt.id > :after ORDER BY attempt.id
""")
_SHARDS = text("""
    SELECT shard.state, shard.retry, shard.device, shard_jobs.next_job, agent_device.name, agent_device.serial,
           CASE WHEN retry THEN shard_jobs.jobs END AS jobs
    FROM shard JOIN shard_jobs ON shard_jobs.shard = shard.id
    LEFT JOIN agent_device ON agent_device.device = shard.device
    WHERE run_id = :run AND (state = 'held' OR (retry AND state = 'waiting'))
""")
_BUILDS = text("""
    SELECT job, key, EXISTS (SELECT 1 FROM procrastinate_jobs
                             WHERE queueing_lock = 'build:' || key AND status = 'doing') AS is_made
    FROM build_wanted WHERE run_id = :run AND failure IS NULL
""")
_RUN = text("""
    SELECT finished_ms, exit_code, bundles FROM run JOIN run_order ON run_order.run_id = run.id WHERE run.id = :run
""")
_SUMS = text("""
    SELECT run_id, soc, count(*) FILTER (WHERE shard.state = 'waiting') AS waiting,
           coalesce(sum(expected_s) FILTER (WHERE shard.state = 'waiting'), 0) AS waiting_s,
           count(*) FILTER (WHERE shard.state = 'held') AS held,
           coalesce(sum(greatest(expected_s - (:now_ms - held_ms) / 1000.0, 0)) FILTER (WHERE shard.state = 'held'), 0)
               AS held_s
    FROM shard JOIN run_order USING (run_id)
    WHERE shard.state IN ('waiting', 'held') AND run_order.state <> 'ended' GROUP BY run_id, soc ORDER BY run_id, soc
""")


class Views(ClusterPart):
    """Reading access for people."""

    def progress(self, run_id: str, after: int) -> RunProgress:
        """Return the news of a submitted run since `after`, the `last` of the previous answer; 0 for everything.

        Raises StoreLostError for a run that was never submitted or is gone.
        """
        seen = self._seen.get(run_id, set()) if after else set()
        with self._database.reading() as connection:
            row = connection.execute(_RUN, {"run": run_id}).first()
            found = connection.execute(ORDER, {"run": run_id}).first()
            if row is None or found is None:
                raise StoreLostError(f"run {run_id} was never submitted to this farm, or was removed from the store")
            asked = {"run": run_id, "after": max(after - _OVERLAP, 0)}
            attempts = connection.execute(_ATTEMPTS, asked).mappings().all()
            shards = connection.execute(_SHARDS, {"run": run_id}).all()
            wanted = connection.execute(_BUILDS, {"run": run_id}).all() if row.bundles else []
            order = order_of(found, self._clock(connection))
        news = [one for one in attempts if one["id"] not in seen]
        last = max([after, *(one["id"] for one in attempts)])
        self._seen[run_id] = {one["id"] for one in attempts if one["id"] > last - _OVERLAP}
        return RunProgress(
            last=last,
            attempts=tuple({name: one[name] for name in one if name != "id"} for one in news),
            retried=frozenset(one.job.id for row in shards if row.retry for one in decode_jobs(row.jobs)),
            running={row.name or row.serial or row.device: row.next_job for row in shards if row.state == "held"},
            building=tuple(sorted({one.job for one in wanted if one.is_made})),
            built=max(row.bundles - len({one.key for one in wanted}), 0),
            to_build=row.bundles,
            order=order,
            finished=row.finished_ms is not None,
            exit_code=row.exit_code,
        )

    @cached_property
    def _seen(self) -> dict[str, set[int]]:
        """Ids of the newest attempts that were returned, by run."""
        return {}

    def queue(self) -> QueueView:
        """Return the queue: open orders, devices, quotas and agents."""
        with self._database.reading() as connection:
            now_ms = self._clock(connection)
            sums = tuple(ShardSum(*row) for row in connection.execute(_SUMS, {"now_ms": now_ms}))
            requests = requests_now(connection, now_ms)
            return QueueView(
                now_ms=now_ms,
                orders=tuple(order_of(row, now_ms) for row in connection.execute(OPEN_ORDERS)),
                situations={
                    soc: read_situation(connection, soc, now_ms, requests).situation
                    for soc in sorted({one.soc for one in sums})
                },
                sums=sums,
                quotas=read_quotas(connection),
                agents=tuple(agent_of(row, now_ms) for row in connection.execute(AGENTS)),
            )
