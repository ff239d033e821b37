"""Shards of submitted runs: assignment, results, the end of their run, and the policy that processes share."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psycopg
import pytest
from msgspec.structs import replace
from shared_rows import (
    SOC,
    TTL_S,
    AgentId,
    agent,
    claim,
    execute,
    facts,
    holding,
    job,
    new_order,
    record,
    result,
    shards,
    shards_of,
    submit,
)
from waiting import until

from farm.base.errors import AgentRefusedError, LeaseLostError, StoreError, UsageError
from farm.dispatch.cluster.delivery import finish, recover
from farm.policy.retries import tried
from farm.results.attempt import Attempt, Verdict
from farm.results.measurements import counted
from farm.store.records import PROTOCOL, ArtifactRecord, JobFile
from farm.store.store import Store, open_store

if TYPE_CHECKING:
    from conftest import Make


# Shards of submitted runs: their assignment, their results, and the fate of unfinished ones.


@pytest.fixture
def address(shared_address: str) -> str:
    return shared_address


def test_a_run_goes_from_its_submission_to_its_end_and_its_progress_is_shown(store: Store) -> None:
    run_id = submit(store, shards(2))
    one = agent(store)
    [held] = claim(store, one)
    assert (held.run_id, held.lease.user, len(held.jobs)) == (run_id, "ada", 2)
    progress = store.cluster.progress(run_id, 0)
    assert (progress.attempts, progress.running) == ((), {"h1.0": job(0).id})
    assert record(store, one, held, 0) == []

    progress = store.cluster.progress(run_id, progress.last)
    assert [(each["job_id"], each["verdict"]) for each in progress.attempts] == [(job(0).id, "passed")]
    assert progress.running == {"h1.0": job(1).id}
    assert (progress.order.waiting, progress.order.held, progress.finished) == (1, 1, False)
    assert store.cluster.progress(run_id, progress.last).attempts == ()
    view = store.cluster.queue()
    assert [(each.run_id, each.waiting, each.held) for each in view.sums] == [(run_id, 1, 1)]
    assert [each.id for each in view.situations[SOC].devices] == ["h1-0"]

    assert record(store, one, held, 1) == []
    store.cluster.release(one, [held.lease])
    assert not store.cluster.end_if_over(run_id)
    [held] = claim(store, one)
    assert record(store, one, held) == []
    store.cluster.release(one, [held.lease])
    assert store.cluster.end_if_over(run_id)
    order = store.cluster.order(run_id)
    assert order is not None
    assert (order.state, order.waiting, order.held, order.ended) == ("ended", 0, 0, 2)
    assert [(one.id, [str(each.verdict) for each in one.attempts]) for one in store.runs.view(run_id).jobs] == [
        (job(n).id, ["passed"]) for n in range(4)
    ]
    assert store.leases.all() == []


def test_a_shard_is_put_back_with_the_jobs_without_a_result(store: Store) -> None:
    _, one, held = holding(store, jobs=4)
    two = agent(store, "h2")
    record(store, one, held, 0)
    # The agent has run the second job as well, and the store has not taken it.
    store.cluster.put_back(one, held.id, held.lease.fence, why="its lease was lost", jobs=held.jobs[2:])
    store.cluster.release(one, [held.lease])

    [again] = claim(store, two, "h2-0")

    assert [each.job for each in again.jobs] == [job(1), job(2), job(3)]
    with pytest.raises(LeaseLostError):
        store.cluster.put_back(one, held.id, held.lease.fence, why="once more")
    refused = store.cluster.record(one, [result(held, held.jobs[1])], ttl_s=TTL_S)
    assert list(refused) == [0]
    assert "no longer this agent's" in refused[0]


def test_a_retry_goes_to_another_device(store: Store) -> None:
    run_id = submit(store, shards(1))
    one = agent(store, devices=2)
    [held] = claim(store, one)
    assert held.others == ("h1-1",)
    failed = result(held, held.jobs[0], Verdict.INFRA)
    failed = replace(failed, repeat=(tried(failed.attempts[0]),))
    store.cluster.record(one, [failed, result(held, held.jobs[1])], ttl_s=TTL_S)
    store.cluster.release(one, [held.lease])

    assert store.cluster.progress(run_id, 0).retried == {job(0).id}
    assert claim(store, one) == []
    [again] = claim(store, one, "h1-1")
    assert again.jobs[0].job == job(0)
    assert [entry.verdict for entry in again.jobs[0].history] == [Verdict.INFRA]
    assert not store.cluster.end_if_over(run_id)


def test_many_results_at_once_are_recorded_once_each(store: Store, make: type[Make]) -> None:
    run_id, one, held = holding(store, jobs=4)
    store.record_device(run_id, make.device("serial-h1-0"))
    files = [ArtifactRecord("a" * 64, 5, "etdump"), ArtifactRecord("b" * 64, 6, "qnn_log")]

    def attempts(number: int) -> tuple[Attempt, ...]:
        common = {"device": "serial-h1-0", "measurements": (make.latency(1.0, number), counted("pte_size", number))}
        first = make.attempt(job(number), started_ms=1, verdict=Verdict.INFRA, reason="hung", **common)
        last = make.attempt(job(number), started_ms=2, comparisons=(make.comparison(sqnr_db=number),), **common)
        return (first, last)

    results = [
        result(held, each, attempts=attempts(number), artifacts=files if number else ())
        for number, each in enumerate(held.jobs)
    ]
    assert store.cluster.record(one, results[:1], ttl_s=TTL_S) == {}
    assert store.cluster.record(one, results, ttl_s=TTL_S) == {0: "recorded already"}

    for number, each in enumerate(store.runs.view(run_id).jobs):
        assert each.attempts == attempts(number)
        kept = [JobFile(*msgspec.structs.astuple(one), attempt=2) for one in files]
        assert store.runs.artifacts(run_id, each.id) == (kept if number else [])
    [device] = store.runs.view(run_id).devices
    assert (device.serial, device.jobs) == ("serial-h1-0", 4)


def test_a_run_that_is_resumed_goes_on(store: Store) -> None:
    run_id = submit(store, shards(1))
    store.cluster.cancel(run_id, "ada")
    assert store.cluster.end_if_over(run_id)
    store.finish_run(run_id, 130)
    with pytest.raises(StoreError, match="submitted before"):
        store.cluster.submit(new_order(run_id), [])

    store.cluster.submit(new_order(run_id), shards(2, first=2), jobs=[job(n) for n in range(2, 6)], again=True)

    order = store.cluster.order(run_id)
    assert order is not None
    assert (order.state, order.waiting, order.ended, order.cancelled_by) == ("open", 2, 1, "")
    assert store.runs.view(run_id).finished_ms is None
    assert len(store.runs.view(run_id).jobs) == 6


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.INFRA])
def test_after_so_many_failures_or_so_long_nothing_begins(store: Store, verdict: Verdict) -> None:
    failing, one, held = holding(store, 3, jobs=1, most_failures=1)
    late = submit(store, shards(1, first=10), "bob", budget_s=0.0)
    record(store, one, held, verdict=verdict)
    store.cluster.release(one, [held.lease])

    assert claim(store, one) == []
    for run_id in (failing, late):
        assert store.cluster.end_if_over(run_id)

    assert {each.why for each in shards_of(store, late)} == {"its time was over"}
    assert [each.why for each in shards_of(store, failing)] == ["", "1 jobs failed", "1 jobs failed"]
    order = store.cluster.order(late)
    assert order is not None
    assert order.is_late


def test_quotas_and_reservations_bind_users_and_orders_take_the_devices_that_they_name(store: Store) -> None:
    run_id = submit(store, shards(8))
    one, there = agent(store, devices=3), ("h1-0", "h1-1", "h1-2")
    store.quotas.set("user:ada", 1, "root")
    store.leases.reserve("h1-0", "bob", 60)
    [held] = claim(store, one, *there)
    assert held.lease.device != "h1-0"
    assert claim(store, one, *there) == []
    assert store.quotas.all() == {"user:ada": 1}
    with pytest.raises(UsageError, match="neither"):
        store.quotas.set("ada", 1, "root")
    store.quotas.set("user:ada", None, "root")
    assert len(claim(store, one, *there)) == 1
    store.leases.cancel("h1-0", "bob")
    assert len(claim(store, one, *there)) == 1
    store.cluster.cancel(run_id, "ada")

    named = submit(store, shards(2, first=50), devices=("h2.1",))
    other_kind = submit(store, shards(2, first=60), "bob", classes=(f"{SOC}/hardware/android",))
    held_by_name = claim(store, agent(store, "h2", devices=2), "h2-0", "h2-1")
    assert [(each.run_id, each.lease.device, each.others) for each in held_by_name] == [(named, "h2-1", ())]
    assert shards_of(store, other_kind)[0].state == "waiting"


def test_a_drained_agent_gets_nothing_new(store: Store) -> None:
    submit(store, shards(2))
    one = agent(store, devices=2)
    [held] = claim(store, one)
    assert store.cluster.drain("h1")
    assert not store.cluster.drain("nobody")
    assert store.cluster.heartbeat(one, None, TTL_S).drain
    assert claim(store, one, "h1-1") == []
    store.cluster.leave(one)
    assert store.cluster.agents() == []
    assert store.leases.all() == []
    assert store.cluster.heartbeat(one, None, TTL_S, [held.lease]).replaced


def test_an_agent_of_another_protocol_and_a_store_in_a_file_are_refused(store: Store, tmp_path: Path) -> None:
    agent(store)
    for protocol, step in ((PROTOCOL + 1, "update farm there"), (PROTOCOL - 1, "update farm on this host")):
        with pytest.raises(AgentRefusedError, match=step):
            store.cluster.register("h2", facts("h2", protocol=protocol), TTL_S, user="farm")
    with open_store(tmp_path / "farm.db") as file, pytest.raises(UsageError, match="PostgreSQL"):
        file.cluster.queue()


# Jobs that finish runs: deferred in the transaction that leaves nothing to run, whichever process writes it.


@pytest.fixture
def messages_store(store: Store) -> Store:
    store.messages.require()
    return store


def connect(messages_store: Store) -> closing[psycopg.Connection]:
    return closing(psycopg.connect(**messages_store.connection_arguments()))


def take_jobs(messages_store: Store) -> list[str]:
    """Return the runs of the jobs that finish runs, and remove the jobs."""
    taken = execute(messages_store, "DELETE FROM procrastinate_jobs RETURNING task_name, args ->> 'run'")
    return [str(run) for task, run in taken if task == "farm.finish"]


def run_shard(messages_store: Store, who: AgentId, verdict: Verdict = Verdict.PASSED) -> None:
    [held] = claim(messages_store, who)
    assert record(messages_store, who, held, verdict=verdict) == []
    messages_store.cluster.release(who, [held.lease])


def test_the_last_result_of_a_run_defers_its_end(messages_store: Store) -> None:
    run_id = submit(messages_store, shards(2))
    one = agent(messages_store)
    run_shard(messages_store, one)
    assert take_jobs(messages_store) == []
    run_shard(messages_store, one)
    assert take_jobs(messages_store) == [run_id]
    failing = submit(messages_store, shards(3, jobs=1, first=10), most_failures=1)
    run_shard(messages_store, one, Verdict.FAILED)
    assert take_jobs(messages_store) == [failing]
    assert finish(messages_store, failing) == 1


def test_a_run_that_is_cancelled_ends_with_its_last_shard(messages_store: Store) -> None:
    run_id, one, held = holding(messages_store, 2)
    messages_store.cluster.cancel(run_id, "ada")
    assert take_jobs(messages_store) == [run_id]
    assert finish(messages_store, run_id) is None
    messages_store.cluster.put_back(one, held.id, held.lease.fence, why="cancelled")
    assert take_jobs(messages_store) == [run_id]
    assert finish(messages_store, run_id) == 130


def test_two_hosts_that_end_the_last_two_shards_at_once_defer_one_end(messages_store: Store) -> None:
    run_id = submit(messages_store, shards(2))
    first, second = (held.id for held in claim(messages_store, agent(messages_store, devices=2), "h1-0", "h1-1"))
    end = "UPDATE shard SET state = 'ended' WHERE id = %s"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with connect(messages_store) as early, connect(messages_store) as late, connect(messages_store) as watch:
        watch.autocommit = True
        early.execute(end, (first,))
        other = threading.Thread(target=late.execute, args=(end, (second,)))
        other.start()
        until(lambda: watch.execute(waits, (late.info.backend_pid,)).fetchone() == (1,))
        early.commit()
        other.join()
        late.commit()
    assert take_jobs(messages_store) == [run_id]


def test_ends_without_a_job_get_one_from_the_repair(messages_store: Store) -> None:
    lost = submit(messages_store, shards(1))
    run_shard(messages_store, agent(messages_store))
    assert take_jobs(messages_store) == [lost]
    late = submit(messages_store, shards(1, first=10), budget_s=0.0)
    empty = submit(messages_store, [])
    submit(messages_store, shards(1, first=20))
    for _ in range(2):
        recover(messages_store, ttl_s=TTL_S)
    assert sorted(take_jobs(messages_store)) == sorted([lost, late, empty])
    for run_id in (lost, late, empty):
        assert finish(messages_store, run_id) is not None
    recover(messages_store, ttl_s=TTL_S)
    assert take_jobs(messages_store) == []
