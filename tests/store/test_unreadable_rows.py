"""Rows of a shared farm that cannot be read: they are set aside with their reason, and other runs go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from shared_rows import TTL_S, AgentId, agent, claim, job, key, record, shards, submit

from farm.base.errors import ExitCode
from farm.dispatch.cluster.delivery import finish
from farm.store.cluster.part import REFUSED_BY
from farm.store.cluster.records import NewBuild
from farm.store.records import PROTOCOL
from farm.store.store import Store, open_store

WAITER = """
    INSERT INTO waiter (id, devices, wanted, user_name, host, pid, purpose, priority, since_ms, expires_ms)
    VALUES ('eve', '{"a": 1}', 1, 'eve', 'h', 1, '', 1, 0, 9999999999999)
"""
OF_RUN = {
    "devices of the order": "UPDATE run_order SET devices = '{\"a\": 1}' WHERE run_id = %(run)s",
    "labels of the order": "UPDATE run_order SET labels = '[1]' WHERE run_id = %(run)s",
    "priority of the order": "UPDATE run_order SET priority = 77 WHERE run_id = %(run)s",
    "done jobs": "UPDATE shard_jobs SET done = 'no json' WHERE shard IN (SELECT id FROM shard WHERE run_id = %(run)s)",
    "jobs": "UPDATE shard_jobs SET jobs = '\\x00' WHERE shard IN (SELECT id FROM shard WHERE run_id = %(run)s)",
}
NAMES = "UPDATE shard_jobs SET names = 'no json' WHERE shard IN (SELECT id FROM shard WHERE run_id = %(run)s)"


class Farm:
    """A shared farm with one agent, and a user who writes rows by hand."""

    def __init__(self, address: str, store: Store) -> None:
        self._address, self.store = address, store
        self.agent: AgentId = agent(store)

    def write(self, statement: str, run: str = "") -> None:
        with closing(psycopg.connect(self._address.replace("+psycopg", ""), autocommit=True)) as connection:
            assert connection.execute(statement, {"run": run}).rowcount

    def claimed_runs(self, times: int) -> list[str]:
        """Return the runs of the shards that the agent's device gets, one after the other."""
        found = []
        for _ in range(times):
            for held in claim(self.store, self.agent):
                found.append(held.run_id)
                record(self.store, self.agent, held)
                self.store.cluster.release(self.agent, [held.lease])
        return found

    def next_build(self, worker: int) -> str:
        """Return the key of the build that a worker takes; "" for none."""
        held = self.store.cluster.take_build(worker, "h1", ["t"])
        return held.task.key if held else ""

    def is_refused(self, run_id: str) -> bool:
        order = self.store.cluster.order(run_id)
        assert order is not None
        code = finish(self.store, run_id)
        return order.cancelled_by == REFUSED_BY and code == ExitCode.REFUSED


@pytest.fixture(name="farm")
def _farm(shared_address: str) -> Iterator[Farm]:
    with open_store(shared_address) as opened:
        yield Farm(shared_address, opened)


def test_a_waiting_request_that_cannot_be_read_is_passed_over(farm: Farm) -> None:
    run = submit(farm.store, shards(1))
    farm.write(WAITER)
    assert farm.claimed_runs(1) == [run]
    assert farm.store.leases.waiting() == []


@pytest.mark.parametrize("what", OF_RUN)
def test_a_run_with_a_row_that_cannot_be_read_is_refused_and_others_go_on(farm: Farm, what: str) -> None:
    bad = submit(farm.store, shards(2), user="eve")
    good = submit(farm.store, shards(2, first=10), user="ada")
    farm.write(OF_RUN[what], bad)
    assert set(farm.claimed_runs(3)) == {good}
    assert farm.is_refused(bad)
    order = farm.store.cluster.order(good)
    assert order is not None
    assert order.cancelled_by == ""


def test_results_of_a_shard_with_names_that_cannot_be_read_end_its_run_alone(farm: Farm) -> None:
    bad = submit(farm.store, shards(1), user="eve")
    farm.write(NAMES, bad)
    assert farm.claimed_runs(1) == [bad]
    good = submit(farm.store, shards(1, first=10), user="ada")
    assert farm.claimed_runs(1) == [good]
    assert farm.is_refused(bad)


@pytest.mark.parametrize("task", ["'no json'", "replace(task, key, 'another key')"])
def test_a_build_that_cannot_be_read_fails_and_others_are_built(farm: Farm, task: str) -> None:
    bad, good = key(0), key(10)
    run = submit(farm.store, shards(1, jobs=1), user="eve", builds=[NewBuild(bad, "t", job(0), {})])
    submit(farm.store, shards(1, jobs=1, first=10), builds=[NewBuild(good, "t", job(10), {})])
    farm.write(f"UPDATE build SET task = {task} WHERE key = '{bad}'")  # noqa: S608 - a parameter of this test
    worker = farm.store.cluster.begin_worker()
    assert [farm.next_build(worker) for _ in range(2)] == [good, ""]
    found = farm.store.cluster.build_of([bad])[bad]
    assert found.reply is not None
    assert (found.state, "cannot be read" in found.reply.reason) == ("failed", True)
    assert farm.is_refused(run)


@pytest.mark.parametrize("args", ['"text"', "[1]", '{"key": {}}', '{"key": "no such build"}'])
def test_a_job_with_arguments_that_name_no_build_is_removed_and_its_build_is_made(farm: Farm, args: str) -> None:
    submit(farm.store, shards(1, jobs=1), builds=[NewBuild(key(0), "t", job(0), {})])
    farm.write(f"UPDATE procrastinate_jobs SET args = '{args}' WHERE task_name = 'farm.build'")  # noqa: S608
    worker = farm.store.cluster.begin_worker()
    assert farm.next_build(worker) == ""
    farm.store.messages.retry(TTL_S)
    assert farm.next_build(worker) == key(0)


def test_an_order_of_another_protocol_waits_and_keeps_no_agent_from_starting(farm: Farm) -> None:
    submit(farm.store, shards(1), protocol=PROTOCOL - 1)
    assert claim(farm.store, agent(farm.store, "h2"), "h2-0") == []
