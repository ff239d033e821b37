"""Shards of submitted runs: who gets them, what is recorded of them, and what becomes of those that nobody ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shared_rows import SOC, TTL_S, agent, job, result, shards, submit

from farm.errors import LeaseLostError, UsageError
from farm.results.attempt import Verdict
from farm.results.blame import tried
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from farm.store.store import Store


@pytest.fixture
def store(new_database: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Store]:
    with open_store(new_database(f"t{abs(hash(request.node.nodeid))}")) as opened:
        yield opened


def test_a_run_goes_from_its_submission_to_its_end(store: Store) -> None:
    run_id = submit(store, shards(2))
    one = agent(store)
    for _ in range(2):
        [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
        assert (held.run_id, held.user, len(held.jobs)) == (run_id, "ada", 2)
        assert store.cluster.record(one, [result(held, each) for each in held.jobs], ttl_s=TTL_S) == {}
        store.cluster.release(one, [held.lease])
        assert not store.cluster.end_if_over(run_id) or held.jobs[0].job == job(2)

    order = store.cluster.order(run_id)
    assert order is not None
    assert (order.state, order.waiting, order.held, order.ended) == ("ended", 0, 0, 2)
    assert store.cluster.unfinished() == [run_id]
    view = store.runs.view(run_id)
    assert [(one.id, [str(each.verdict) for each in one.attempts]) for one in view.jobs] == [
        (job(n).id, ["passed"]) for n in range(4)
    ]
    assert store.leases.all() == []


def test_a_shard_is_put_back_with_what_is_left_of_it(store: Store) -> None:
    submit(store, shards(1, jobs=3))
    one, two = agent(store), agent(store, "h2")
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S)
    store.cluster.put_back(one, held.id, held.lease.fence, why="the host is drained")
    store.cluster.release(one, [held.lease])

    [again] = store.cluster.claim(two, SOC, ["h2-0"], ttl_s=TTL_S)

    assert [each.job for each in again.jobs] == [job(1), job(2)]
    with pytest.raises(LeaseLostError):
        store.cluster.put_back(one, held.id, held.lease.fence, why="once more")
    refused = store.cluster.record(one, [result(held, held.jobs[1])], ttl_s=TTL_S)
    assert list(refused) == [0]
    assert "not this agent's" in refused[0]


def test_what_another_device_is_to_try_goes_to_another_device(store: Store) -> None:
    run_id = submit(store, shards(1))
    one = agent(store, devices=2)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert held.others == ("h1-1",)
    failed = result(held, held.jobs[0], Verdict.INFRA)
    failed = result(held, held.jobs[0], Verdict.INFRA, repeat=(tried(failed.attempts[0]),))
    store.cluster.record(one, [failed, result(held, held.jobs[1])], ttl_s=TTL_S)
    store.cluster.release(one, [held.lease])

    assert store.cluster.progress(run_id, 0).retried == {job(0).id}
    assert store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S) == []
    [again] = store.cluster.claim(one, SOC, ["h1-1"], ttl_s=TTL_S)
    assert again.jobs[0].job == job(0)
    assert [entry.verdict for entry in again.jobs[0].history] == [Verdict.INFRA]
    assert not store.cluster.end_if_over(run_id)


def test_a_result_is_recorded_once(store: Store) -> None:
    run_id = submit(store, shards(1))
    one = agent(store)
    [held] = store.cluster.claim(one, SOC, ["h1-0"], ttl_s=TTL_S)
    assert store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S) == {}
    assert store.cluster.record(one, [result(held, held.jobs[0])], ttl_s=TTL_S) == {0: "recorded already"}
    assert [len(each.attempts) for each in store.runs.view(run_id).jobs] == [1, 0]


def test_a_shared_farm_needs_postgresql(tmp_path: Path) -> None:
    with open_store(tmp_path / "farm.db") as store, pytest.raises(UsageError, match="PostgreSQL"):
        store.cluster.orders()
