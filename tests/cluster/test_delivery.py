"""Delivery of messages to agents: late, repeated, after an absence of the database, and after an agent's death."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from chaos_store import Cluster
from log_lines import LogLines
from shared_rows import defer_finish, execute
from stores import create_store, drop_database
from waiting import until

from farm.base.errors import StoreError
from farm.dispatch.cluster.delivery import MOST_CONNECTIONS, MessageDelivery
from farm.store.messages.messages import needed_version
from farm.store.store import Store


@pytest.fixture
def address(server: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    address = create_store(str(server.folder), f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


class Heard:
    """Arguments of handlers in the order of their calls, and log lines."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.recoveries = 0
        self.notes = LogLines()
        self.hold = threading.Event()
        self.hold.set()

    def finish(self, run: str) -> None:
        self.runs.append(run)
        if run == "run-bad":
            raise StoreError("the lease is lost")
        self.hold.wait(30)

    def recover(self) -> bool:
        self.recoveries += 1
        return False


@contextmanager
def delivering(store: Store, heard: Heard, *, patience_s: float = 5, **more: Any) -> Iterator[MessageDelivery]:
    delivery = MessageDelivery(store, ttl_s=30, finish_run=heard.finish, recover=heard.recover, **more)
    delivery.start()
    try:
        until(lambda: delivery.is_connected)
        yield delivery
    finally:
        heard.hold.set()
        delivery.stop(patience_s)


def states(store: Store) -> dict[int, str]:
    return dict(execute(store, "SELECT id, status::text FROM procrastinate_jobs"))


def defer(store: Store, task: str, lock: str, queue: str = "farm") -> int:
    [(number,)] = execute(
        store,
        "SELECT unnest(procrastinate_defer_jobs_v1(ARRAY["
        "ROW(%s, %s, 0, NULL, %s, '{\"timestamp\": 1}'::jsonb, NULL)::procrastinate_job_to_defer_v1]))",
        queue,
        task,
        lock,
    )
    return int(number)


def test_an_agent_hears_of_ends_of_runs_and_leaves_nothing(store: Store) -> None:
    heard = Heard()
    store.messages.require()
    defer_finish(store, "run-bad")
    # A task name of an earlier version stops no worker.
    defer(store, "farm.mend", "farm.mend")
    with delivering(store, heard):
        for number in range(5):
            defer_finish(store, f"run-{number}")
        until(lambda: len(heard.runs) == 6 and heard.recoveries)
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
        assert 1 < execute(store, query, "farm messages")[0][0] <= MOST_CONNECTIONS + 1
        until(lambda: not states(store))
    assert sorted(heard.runs) == [*(f"run-{number}" for number in range(5)), "run-bad"]
    assert heard.notes == ["the end of run run-bad: the lease is lost"], "the error of a handler ends no other"


def test_tables_of_a_newer_farm_are_refused_and_of_an_older_one_brought_up_to_date(store: Store) -> None:
    store.messages.require()
    execute(store, "UPDATE farm_messages SET version = '99.00.00_01/1'")
    with pytest.raises(StoreError, match="of a newer farm.*update farm"):
        store.messages.require()
    # Procrastinate's newest migration makes this function again, without farm's additions to all functions.
    name = "procrastinate_trigger_function_status_events_update_v1"
    execute(store, "DROP TRIGGER procrastinate_trigger_status_events_update_v1 ON procrastinate_jobs")
    execute(store, f"DROP FUNCTION {name}")
    execute(store, "UPDATE farm_messages SET version = '03.04.00_01/1'")
    store.messages.require()
    assert execute(store, "SELECT version FROM farm_messages") == [(needed_version(),)]
    assert execute(store, "SELECT prosecdef FROM pg_proc WHERE proname = %s", name) == [(True,)]


def test_a_stopped_agent_puts_back_what_it_held(store: Store) -> None:
    heard, other = Heard(), Heard()
    heard.hold.clear()
    with delivering(store, heard, patience_s=0.2) as delivery:
        defer_finish(store, "run-1")
        until(lambda: heard.runs)
        delivery.stop(0.2)
        # Beside it there may be a recovery, which is sent every ten seconds.
        finishing = "SELECT status::text FROM procrastinate_jobs WHERE task_name = 'farm.finish'"
        assert execute(store, finishing) == [("todo",)]
    # The other agent gets the message at once, also with a wrong clock.
    with delivering(store, other):
        until(lambda: other.runs, timeout_s=3)


def hold_as_dead(store: Store, lock: str) -> int:
    """Send a message with a queueing lock, let a worker without a heartbeat take it, and return its id."""
    sent = defer(store, "farm.recover", lock)
    [(worker,)] = execute(store, "SELECT worker_id FROM procrastinate_register_worker_v1()")
    execute(store, "SELECT procrastinate_fetch_job_v2(%s, %s)", ["farm"], worker)
    execute(store, "UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour'")
    return sent


def test_messages_of_dead_agents_are_put_back_without_their_duplicates(store: Store) -> None:
    store.messages.require()
    # The messages of an agent that is killed and restarted repeatedly: each process holds the message of its time.
    held = [hold_as_dead(store, "farm.recover") for _ in range(6)]
    duplicate, ordinary = hold_as_dead(store, "farm.remove_ended"), hold_as_dead(store, "finish:run-1")
    waiting = defer(store, "farm.remove_ended", "farm.remove_ended")
    assert store.messages.retry(1e6) == 0, "no worker is dead before the server has been up for as long"
    until(lambda: store.messages.retry(0.05) > 0)
    left = states(store)
    assert (left.pop(ordinary), left.pop(waiting), duplicate in left) == ("todo", "todo", False)
    assert list(left.values()) == ["todo"]
    assert left.keys() <= set(held)


def test_a_handler_that_runs_while_the_database_restarts_goes_on(server: Cluster, store: Store) -> None:
    heard = Heard()
    heard.hold.clear()
    with delivering(store, heard):
        defer_finish(store, "run-1")
        until(lambda: heard.runs)
        server.stop()
        until(lambda: any("the database is away" in note or "trying again" in note for note in heard.notes))
        server.start()
        until(lambda: "messages: the database is back" in heard.notes)
        heard.hold.set()
        defer_finish(store, "run-2")
        recoveries = heard.recoveries
        until(lambda: "run-2" in heard.runs and heard.recoveries > recoveries)
