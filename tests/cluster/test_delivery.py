"""Delivery of messages and notices: late, repeated, after absences and deaths. Real PostgreSQL and servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from chaos_store import Cluster
from log_lines import LogLines
from made import config
from receivers import LOOPBACK, Hook, web_server
from shared_rows import defer_finish, execute
from stores import create_store
from waiting import until

from farm.base.errors import StoreError
from farm.devices.device import HealthEvent
from farm.dispatch.cluster import delivery
from farm.dispatch.cluster.delivery import MOST_CONNECTIONS, MessageDelivery, NoticeTask, remove_ended, retry_wait_s
from farm.dispatch.cluster.nightly_starter import receivers_of
from farm.dispatch.nightly.plan import WebhookTable
from farm.dispatch.notify import delivery as notify
from farm.dispatch.notify import quarantine
from farm.dispatch.notify.delivery import Notice, find_receivers, send_notices
from farm.dispatch.notify.quarantine import Announcer
from farm.store.messages.messages import Message, NoticeArguments, needed_version
from farm.store.store import Store, open_store


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
def started(one: MessageDelivery, patience_s: float = 5) -> Iterator[None]:
    one.start()
    try:
        until(lambda: one.is_connected)
        yield
    finally:
        one.stop(patience_s)


@contextmanager
def delivering(store: Store, heard: Heard, *, patience_s: float = 5) -> Iterator[MessageDelivery]:
    one = MessageDelivery(store, ttl_s=30, finish_run=heard.finish, recover=heard.recover)
    with started(one, patience_s):
        try:
            yield one
        finally:
            heard.hold.set()


def states(store: Store) -> dict[int, str]:
    return dict(execute(store, "SELECT id, status::text FROM procrastinate_jobs"))


def defer(store: Store, task: str, lock: str, queue: str = "farm", arguments: str = '{"timestamp": 1}') -> int:
    job = "ROW(%s, %s, 0, NULL, %s, %s::jsonb, NULL)::procrastinate_job_to_defer_v1"
    query = f"SELECT unnest(procrastinate_defer_jobs_v1(ARRAY[{job}]))"
    [(number,)] = execute(store, query, queue, task, lock, arguments)
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
    with delivering(store, heard, patience_s=0.2) as one:
        defer_finish(store, "run-1")
        until(lambda: heard.runs)
        one.stop(0.2)
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


def test_a_handler_that_runs_while_the_database_restarts_goes_on(server: Cluster) -> None:
    heard = Heard()
    heard.hold.clear()
    with open_store(create_store(str(server.folder), "restarted")) as store, delivering(store, heard):
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


class Farm:
    """Shared farm with one device, and a receiver whose address and token are secrets."""

    def __init__(self, store: Store, url: str, hook: Hook, folder: Path) -> None:
        self.store, self.hook, self.device = store, hook, "R5CT1"
        self.to = f"webhook 1 (http://{LOOPBACK}:{hook.port})"
        (folder / "address").write_text(hook.url("/T0/hooksecret"))
        (folder / "token").write_text("tokensecret")
        text = f'store = "{url}"\nartifacts = "file://{folder}/artifacts"\n'
        self.config = config(folder, f'{text}[[notify.webhook]]\nurl_file = "address"\ntoken_file = "token"\n')
        self.receivers = find_receivers(self.config.notify.webhook, self.config.notify.mail)

    def announcer(self) -> Announcer:
        return Announcer(self.config, self.store)

    def quarantine(self) -> None:
        self.store.devices.record_health(HealthEvent(self.device, "gave_up", "quarantined", "no answer"))

    def quarantine_and_die(self) -> None:
        """Let the process that sees a quarantine die between its claim and its first attempt."""
        self.quarantine()
        assert len(self.store.quarantines.claim(self.announcer()._queue)) == 1

    def outcome(self) -> str:
        return next(one.reason for one in self.store.devices.health_events(self.device, 9) if one.event == "notice")

    def rows(self) -> list[str]:
        """Return the jobs that send notices, as text."""
        query = "SELECT job::text FROM procrastinate_jobs AS job WHERE task_name = 'farm.notify'"
        return [str(row) for (row,) in execute(self.store, query)]

    @contextmanager
    def agent(self, receivers: Any = None) -> Iterator[None]:
        notices = NoticeTask(self.store, receivers or self.receivers)
        with started(MessageDelivery(self.store, recover=lambda: False, ttl_s=30, notices=notices)):
            yield


@pytest.fixture
def make_farm(
    store: Store, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Farm]]:
    """Function that makes a farm whose receiver gives these answers first."""
    for module, name, value in (
        (notify, "_WAITS_S", (0.01,)), (notify, "GRACE_S", 0.5), (quarantine, "GRACE_S", 0.5),
        (notify, "_LONGEST_S", 0.0), (delivery, "_FIRST_WAIT_S", 0.1), (delivery, "_LOOK_S", 0.2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    store.messages.require()
    with ExitStack() as servers:
        yield lambda *answers: Farm(store, address, servers.enter_context(web_server(list(answers))), tmp_path)


def test_a_receiver_that_is_down_for_longer_than_the_command_gets_the_notice_once(
    make_farm: Callable[..., Farm],
) -> None:
    # Two answers to the process that sees the quarantine, and two more to the agent.
    log, farm = LogLines(), make_farm(503, 503, 503, 503)
    farm.quarantine()
    farm.announcer().close()
    assert len(farm.hook.requests) == 2
    [row] = farm.rows()
    assert "secret" not in row, "the row names the receiver, and holds no secret"
    assert farm.outcome().startswith(f"NOT SENT: {farm.to}: ")
    assert farm.outcome().endswith("2 times; agents with this receiver try again")
    with farm.agent():
        until(lambda: farm.outcome().endswith(f"; sent: {farm.to}"))
        until(lambda: not farm.rows())
        time.sleep(0.5)
    assert len(farm.hook.requests) == 5
    assert len({headers["Idempotency-Key"] for _, headers, _ in farm.hook.requests}) == 1
    assert {headers["Authorization"] for _, headers, _ in farm.hook.requests} == {"Bearer tokensecret"}
    assert f"NOT NOTIFIED that {farm.device} is quarantined" in log[0]


def test_a_notice_that_was_sent_is_not_sent_by_agents(make_farm: Callable[..., Farm]) -> None:
    farm = make_farm()
    with farm.agent(), farm.agent():
        farm.quarantine()
        announcers = [farm.announcer() for _ in range(2)]
        for one in announcers:
            one.close()
        assert farm.rows() == []
        time.sleep(0.5)
        assert len(farm.hook.requests) == 1
        assert farm.outcome() == f"sent: {farm.to}"


def test_the_notice_of_a_process_that_died_is_sent_once_by_one_of_two_agents(make_farm: Callable[..., Farm]) -> None:
    farm = make_farm(503, 503)
    farm.quarantine_and_die()
    with farm.agent(), farm.agent():
        until(lambda: farm.outcome().startswith("sent: "))
        time.sleep(0.5)
    assert [json.loads(body)["device"]["id"] for body in farm.hook.bodies] == [farm.device] * 3


def test_a_notice_that_cannot_arrive_is_recorded(
    make_farm: Callable[..., Farm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MOST_TRIES", 2)
    log, farm = LogLines(), make_farm(*[503] * 9)
    farm.quarantine_and_die()
    with farm.agent():
        until(lambda: farm.outcome().startswith("NOT SENT: "))
        until(lambda: not farm.rows())
    assert len(farm.hook.requests) == 2
    assert any("NOT SENT: webhook 1" in line for line in log)


def test_waits_for_a_receiver_grow_and_end_after_some_hours() -> None:
    waits = [retry_wait_s(tries) for tries in range(1, delivery._MOST_TRIES)]
    assert waits == sorted(waits)
    assert 5 * 3600 < sum(waits) < 8 * 3600


def test_a_hostile_row_ends_no_worker(make_farm: Callable[..., Farm]) -> None:
    log, farm = LogLines(), make_farm()
    with farm.agent():
        for arguments in ('{"message": 3}', '{"about": {"a": 1}, "message": {"body": "x"}}', "{}"):
            defer(farm.store, "farm.notify", arguments, farm.receivers[0].queue, arguments)
        farm.quarantine_and_die()
        until(lambda: not farm.rows())
        assert len(farm.hook.requests) == 1
    assert len([line for line in log if "its row is unreadable" in line]) == 3


def test_a_notice_without_a_host_that_has_its_receiver_ends_after_a_day(make_farm: Callable[..., Farm]) -> None:
    log, farm = LogLines(), make_farm()
    notice = Notice(farm.receivers[0], NoticeArguments(Message("{}"), "nightly run phones"))
    assert farm.store.messages.defer_notices([notice.queued()], 0.0) == [notice.key]
    assert farm.store.messages.defer_notices([notice.queued()], 0.0) == [], "it is queued once"
    remove_ended(farm.store)
    assert len(farm.rows()) == 1
    execute(farm.store, "UPDATE procrastinate_events SET at = at - interval '25 hours'")
    remove_ended(farm.store)
    assert farm.rows() == []
    assert log == ["NOT NOTIFIED of nightly run phones: no host has had the receiver for a day"]


def test_notices_of_nightly_runs(
    make_farm: Callable[..., Farm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm, file = make_farm(503, 503), tmp_path / "nightly.toml"
    file.write_text('[nightly]\nname = "n"\n[[notify.webhook]]\nurl_env = "NIGHTLY_HOOK"\nwhen = "always"\n')
    monkeypatch.setenv("NIGHTLY_HOOK", farm.hook.url("/nightlysecret"))
    [receiver] = find_receivers((WebhookTable(url_env="NIGHTLY_HOOK", when="always"),), None)
    notice = Notice(receiver, NoticeArguments(Message('{"text": "n"}'), f"nightly run n {time.time_ns()}"))
    farm.store.messages.defer_notices([notice.queued()], 0.5)
    [failed] = send_notices([notice], farm.store.messages)
    assert not failed.ok
    with farm.agent(receivers_of(file)):
        until(lambda: len(farm.hook.requests) == 3)
        until(lambda: not farm.rows())
    assert farm.hook.bodies == [b'{"text": "n"}'] * 3
