"""Delivery of messages to agents: late, repeated, after an absence of the database, and after an agent's death."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from chaos_store import Cluster
from log_lines import LogLines
from postgresql_server import server_binaries
from shared_rows import defer_finish
from store_template import create_store, drop_database
from waiting import until

from farm.base.errors import StoreError
from farm.dispatch.cluster.delivery import app as delivery_app
from farm.dispatch.cluster.delivery.app import Periodic
from farm.dispatch.cluster.delivery.worker import MessageDelivery, recover
from farm.store.messages.install import needed_version
from farm.store.store import Store

# Seconds for two rounds of the agents' poll every 10 s.
_WATCHED_S = 20.5
_HAS_MENDED = """
    SELECT EXISTS (SELECT 1 FROM procrastinate_periodic_defers)
       AND NOT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    cluster = Cluster(server_binaries(), "logging_collector=on", "log_directory=log")
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def address(server: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    address = create_store(str(server.folder), f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


class Heard:
    """Arguments of handlers in the order of their calls, and log lines."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.notes = LogLines()
        self.hold = threading.Event()
        self.hold.set()

    def finish(self, run: str) -> None:
        self.calls.append(("finish", run))
        self.hold.wait(30)

    def recover(self) -> bool:
        self.calls.append(("recover", ""))
        return False

    def of(self, kind: str) -> list[str]:
        return [argument for called, argument in self.calls if called == kind]


@contextmanager
def delivering(store: Store, heard: Heard, *, patience_s: float = 5, **more: Any) -> Iterator[MessageDelivery]:
    calls: dict[str, Any] = {"finish": heard.finish, "recover": heard.recover, **more}
    delivery = MessageDelivery(store, ttl_s=30, **calls)
    delivery.start()
    try:
        until(lambda: delivery.is_connected)
        yield delivery
    finally:
        heard.hold.set()
        delivery.stop(patience_s)


def finishes(store: Store) -> list[tuple[str, str]]:
    """Return run and status of the jobs that finish runs."""
    import psycopg

    with psycopg.connect(**store.connection_arguments()) as connection:
        query = (
            "SELECT args ->> 'run', status::text FROM procrastinate_jobs WHERE task_name = 'farm.finish' ORDER BY id"
        )
        return connection.execute(query).fetchall()


def test_an_agent_hears_of_ends_of_runs_and_leaves_nothing(store: Store) -> None:
    heard = Heard()
    store.messages.require()
    defer_finish(store, "run-1")
    with delivering(store, heard):
        defer_finish(store, "run-2")
        until(lambda: len(heard.of("finish")) == 2 and heard.of("recover"))
    assert sorted(heard.of("finish")) == ["run-1", "run-2"]
    assert finishes(store) == []
    assert not heard.notes


def test_an_error_of_a_handler_is_noted_and_ends_no_other(store: Store) -> None:
    heard = Heard()

    def finish(run: str) -> None:
        heard.finish(run)
        if run == "run-1":
            raise StoreError("the lease is lost")

    with delivering(store, heard, finish=finish):
        defer_finish(store, "run-1")
        until(lambda: heard.notes)
        defer_finish(store, "run-2")
        until(lambda: len(heard.of("finish")) == 2)
    assert heard.notes == ["the end of run run-1: the lease is lost"]


def test_tables_of_a_newer_farm_are_refused_and_of_an_older_one_brought_up_to_date(store: Store) -> None:
    import psycopg

    store.messages.require()
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        connection.execute("UPDATE farm_messages SET version = '99.00.00_01/1'")
        with pytest.raises(StoreError, match="of a newer farm.*update farm"):
            store.messages.require()
        # Procrastinate's newest migration makes this function again, without farm's additions to all functions.
        name = "procrastinate_trigger_function_status_events_update_v1"
        connection.execute("DROP TRIGGER procrastinate_trigger_status_events_update_v1 ON procrastinate_jobs")
        connection.execute(f"DROP FUNCTION {name}")
        connection.execute("UPDATE farm_messages SET version = '03.04.00_01/1'")
        store.messages.require()
        assert connection.execute("SELECT version FROM farm_messages").fetchall() == [(needed_version(),)]
        query = "SELECT prosecdef FROM pg_proc WHERE proname = %s"
        assert connection.execute(query, (name,)).fetchall() == [(True,)]


def test_a_stopped_agent_puts_back_what_it_held(store: Store) -> None:
    heard = Heard()
    heard.hold.clear()
    with delivering(store, heard, patience_s=0.2) as delivery:
        defer_finish(store, "run-1")
        until(lambda: heard.of("finish"))
        assert finishes(store) == [("run-1", "doing")]
        delivery.stop(0.2)
        assert finishes(store) == [("run-1", "todo")]
    # The other agent gets the message at once, also with a wrong clock.
    other = Heard()
    with delivering(store, other):
        until(lambda: other.of("finish"), timeout_s=3)


def test_messages_of_a_dead_agent_are_put_back(store: Store) -> None:
    import psycopg

    store.messages.require()
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as dead:
        worker = dead.execute("SELECT worker_id FROM procrastinate_register_worker_v1()").fetchone()
        assert worker is not None
        defer_finish(store, "run-1")
        dead.execute("SELECT procrastinate_fetch_job_v2(%s, %s)", (["farm"], worker[0]))
        heard = Heard()
        with delivering(store, heard):
            assert store.messages.retry(1e6) == 0  # no worker is dead before the server has been up for as long
            dead.execute(
                "UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour' WHERE id = %s", worker
            )
            assert finishes(store) == [("run-1", "doing")]
            assert store.messages.retry(0.01) >= 1
            until(lambda: heard.of("finish"), timeout_s=3)


def hold_as_dead(store: Store, lock: str, *, queue: str = "farm") -> int:
    """Send a message with a queueing lock, let a worker without a heartbeat take it, and return its id."""
    import psycopg

    with psycopg.connect(**store.connection_arguments(), autocommit=True) as dead:
        sent = dead.execute(
            "SELECT unnest(procrastinate_defer_jobs_v1(ARRAY["
            "ROW(%s, 'farm.recover', 0, NULL, %s, '{}'::jsonb, NULL)::procrastinate_job_to_defer_v1]))",
            (queue, lock),
        ).fetchone()
        worker = dead.execute("SELECT worker_id FROM procrastinate_register_worker_v1()").fetchone()
        assert sent is not None
        assert worker is not None
        dead.execute("SELECT procrastinate_fetch_job_v2(%s, %s)", ([queue], worker[0]))
        dead.execute("UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour'")
    return int(sent[0])


def states(store: Store) -> dict[int, str]:
    import psycopg

    with psycopg.connect(**store.connection_arguments()) as connection:
        return dict(connection.execute("SELECT id, status::text FROM procrastinate_jobs").fetchall())


def test_duplicates_among_messages_of_dead_workers_go_and_the_others_are_put_back(store: Store) -> None:
    store.messages.require()
    # The messages of an agent that is killed and restarted repeatedly: each process holds the message of its time.
    held = [hold_as_dead(store, "farm.recover") for _ in range(6)]
    ordinary = hold_as_dead(store, "finish:run-1")
    assert set(states(store).values()) == {"doing"}
    # The server has been up for longer than that.
    until(lambda: store.messages.retry(0.05) > 0)
    left = states(store)
    assert left.pop(ordinary) == "todo"
    assert list(left.values()) == ["todo"]
    assert left.keys() <= set(held)


def test_a_duplicate_of_a_waiting_message_keeps_no_other_from_being_put_back(store: Store) -> None:
    import psycopg

    store.messages.require()
    duplicate = hold_as_dead(store, "farm.remove_ended")
    other = hold_as_dead(store, "finish:run-2")
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        connection.execute(
            "SELECT procrastinate_defer_jobs_v1(ARRAY["
            "ROW('farm', 'farm.remove_ended', 0, NULL, 'farm.remove_ended', '{}'::jsonb, NULL)"
            "::procrastinate_job_to_defer_v1])"
        )
    until(lambda: store.messages.retry(0.05) > 0)
    left = states(store)
    assert duplicate not in left
    assert left[other] == "todo"


def test_a_job_with_a_task_name_of_an_earlier_version_is_removed_and_stops_no_worker(store: Store) -> None:
    import psycopg

    store.messages.require()
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        connection.execute(
            "SELECT procrastinate_defer_jobs_v1(ARRAY["
            "ROW('farm', 'farm.mend', 100, NULL, 'farm.mend', '{\"timestamp\": 1}'::jsonb, NULL)"
            "::procrastinate_job_to_defer_v1])"
        )
    heard = Heard()
    with delivering(store, heard):
        defer_finish(store, "run-1")
        until(lambda: heard.of("finish"))
        until(lambda: not states(store))
    assert heard.notes == []


@pytest.mark.whole
def test_a_restarted_database_is_found_again(server: Cluster, store: Store) -> None:
    heard = Heard()
    with delivering(store, heard):
        until(lambda: heard.of("recover"))
        server.stop()
        until(lambda: any("the database is away" in note or "trying again" in note for note in heard.notes))
        server.start()
        back = time.monotonic()
        until(lambda: "messages: the database is back" in heard.notes)
        defer_finish(store, "run-1")
        until(lambda: heard.of("finish"))
        assert time.monotonic() - back < 15
        recoveries = len(heard.of("recover"))
        until(lambda: len(heard.of("recover")) > recoveries)


def test_a_handler_that_runs_while_the_database_restarts_goes_on(server: Cluster, store: Store) -> None:
    heard = Heard()
    heard.hold.clear()
    with delivering(store, heard):
        defer_finish(store, "run-1")
        until(lambda: heard.of("finish"))
        server.stop()
        server.start()
        until(lambda: "messages: the database is back" in heard.notes)
        heard.hold.set()
        defer_finish(store, "run-2")
        until(lambda: "run-2" in heard.of("finish"))


def test_what_is_done_now_and_then_is_done_once_by_those_who_have_it(store: Store) -> None:
    nights: list[str] = []
    begun = threading.Event()

    def night(name: str) -> None:
        nights.append(name)
        begun.set()

    with ExitStack() as agents:
        for name in ("a", "b"):
            every_2_s = Periodic("night", "* * * * * */2", lambda name=name: night(name))
            agents.enter_context(delivering(store, Heard(), periodic=(every_2_s,)))
        # An agent without nightly runs takes none.
        agents.enter_context(delivering(store, Heard()))
        assert begun.wait(10)
        start = time.monotonic()
        count = len(nights)
        time.sleep(4)
        assert len(nights) - count <= (time.monotonic() - start) / 2 + 1


def test_connections_are_bounded_and_say_what_they_are(store: Store) -> None:
    import psycopg

    heard = Heard()
    with delivering(store, heard) as delivery, psycopg.connect(**store.connection_arguments()) as connection:
        for number in range(5):
            defer_finish(store, f"run-{number}")
        until(lambda: len(heard.of("finish")) == 5)
        assert delivery.is_connected
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
        found = connection.execute(query, ("farm messages",)).fetchone()
        assert found is not None
        assert 1 < found[0] <= delivery_app.MOST_CONNECTIONS + 1


@pytest.mark.whole
def test_three_idle_agents_ask_little(server: Cluster, store: Store) -> None:
    import psycopg

    with ExitStack() as agents:
        for _ in range(3):
            # With the real recovery, and nothing else that an agent asks.
            agents.enter_context(delivering(store, Heard(), recover=partial(recover, store, ttl_s=10)))
        with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
            database = connection.info.dbname
            # Agents that start connect and recover once at once.
            until(lambda: connection.execute(_HAS_MENDED).fetchone() == (True,))
            for setting in ("log_statement = 'all'", "log_line_prefix = '%d '"):
                connection.execute(f"ALTER SYSTEM SET {setting}")
            connection.execute("SELECT pg_reload_conf()")
            time.sleep(_WATCHED_S)
            connection.execute("ALTER SYSTEM RESET ALL")
            connection.execute("SELECT pg_reload_conf()")

    def log() -> str:
        return "".join(file.read_text() for file in (server.folder / "data" / "log").glob("*"))

    until(lambda: "ALTER SYSTEM RESET ALL" in log(), "the last statement in the log")
    asked = re.findall(rf"^{database} LOG:  (?:statement|execute [^:]*): (.*)", log(), re.MULTILINE)
    queries = [query for query in asked if "ALTER SYSTEM" not in query and "pg_reload_conf" not in query]
    assert queries
    assert len(queries) / _WATCHED_S < 2, Counter(query[:60] for query in queries)
