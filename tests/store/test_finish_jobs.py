"""Jobs that finish runs: deferred in the transaction that leaves nothing to run, whichever process writes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from shared_rows import TTL_S, AgentId, agent, claim, holding, record, shards, submit
from waiting import until

from farm.dispatch.cluster.delivery.worker import finish, recover
from farm.results.attempt import Verdict
from farm.store.store import Store, open_store

_RUNS = "SELECT args ->> 'run' FROM procrastinate_jobs WHERE task_name = 'farm.finish' ORDER BY id"


@pytest.fixture
def store(shared_address: str) -> Iterator[Store]:
    with open_store(shared_address) as opened:
        opened.messages.require()
        yield opened


def connect(store: Store) -> closing[psycopg.Connection]:
    return closing(psycopg.connect(**store.connection_arguments()))


def take_jobs(store: Store) -> list[str]:
    """Return the runs of the jobs that finish runs, and remove the jobs."""
    with connect(store) as connection, connection:
        runs = [str(run) for (run,) in connection.execute(_RUNS)]
        connection.execute("DELETE FROM procrastinate_jobs")
    return runs


def run_shard(store: Store, who: AgentId, verdict: Verdict = Verdict.PASSED) -> None:
    [held] = claim(store, who)
    assert record(store, who, held, verdict=verdict) == []
    store.cluster.release(who, [held.lease])


def test_the_last_result_of_a_run_defers_its_end(store: Store) -> None:
    run_id = submit(store, shards(2))
    one = agent(store)
    run_shard(store, one)
    assert take_jobs(store) == []
    run_shard(store, one)
    assert take_jobs(store) == [run_id]
    failing = submit(store, shards(3, jobs=1, first=10), most_failures=1)
    run_shard(store, one, Verdict.FAILED)
    assert take_jobs(store) == [failing]
    assert finish(store, failing) == 1


def test_a_run_that_is_cancelled_ends_with_its_last_shard(store: Store) -> None:
    run_id, one, held = holding(store, 2)
    store.cluster.cancel(run_id, "ada")
    assert take_jobs(store) == [run_id]
    assert finish(store, run_id) is None
    store.cluster.put_back(one, held.id, held.lease.fence, why="cancelled")
    assert take_jobs(store) == [run_id]
    assert finish(store, run_id) == 130


def test_two_hosts_that_end_the_last_two_shards_at_once_defer_one_end(store: Store) -> None:
    run_id = submit(store, shards(2))
    first, second = (held.id for held in claim(store, agent(store, devices=2), "h1-0", "h1-1"))
    end = "UPDATE shard SET state = 'ended' WHERE id = %s"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with connect(store) as early, connect(store) as late, connect(store) as watch:
        watch.autocommit = True
        early.execute(end, (first,))
        other = threading.Thread(target=late.execute, args=(end, (second,)))
        other.start()
        until(lambda: watch.execute(waits, (late.info.backend_pid,)).fetchone() == (1,))
        early.commit()
        other.join()
        late.commit()
    assert take_jobs(store) == [run_id]


def test_ends_without_a_job_get_one_from_the_repair(store: Store) -> None:
    lost = submit(store, shards(1))
    run_shard(store, agent(store))
    assert take_jobs(store) == [lost]
    late = submit(store, shards(1, first=10), budget_s=0.0)
    empty = submit(store, [])
    submit(store, shards(1, first=20))
    for _ in range(2):
        recover(store, ttl_s=TTL_S)
    assert sorted(take_jobs(store)) == sorted([lost, late, empty])
    for run_id in (lost, late, empty):
        assert finish(store, run_id) is not None
    recover(store, ttl_s=TTL_S)
    assert take_jobs(store) == []
