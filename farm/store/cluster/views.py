"""Views of the shared farm for people: progress of a run, and the queue."""

from __future__ import annotations

from functools import cached_property

from sqlalchemy import text

from farm.base.errors import StoreLostError
from farm.store.cluster.agents import AGENTS, agent_of
from farm.store.cluster.orders import OPEN_ORDERS, ORDER, order_of
from farm.store.cluster.part import ClusterPart
from farm.store.cluster.records import QueueView, RunProgress, ShardSum
from farm.store.cluster.shard_rows import decode_jobs
from farm.store.leases.rows import requests_now
from farm.store.leases.situations import read_quotas, read_situation

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
