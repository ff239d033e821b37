"""Notices of a shared farm: in spite of dead processes and absent receivers, each once. Real PostgreSQL and servers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from log_lines import LogLines
from receivers import LOOPBACK, Hook, web_server
from store_template import drop_database
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.devices.health import HealthEvent
from farm.dispatch.cluster.delivery import notices as task
from farm.dispatch.cluster.delivery import worker
from farm.dispatch.cluster.delivery.notices import NoticeTask, retry_wait_s
from farm.dispatch.cluster.delivery.worker import MessageDelivery, remove_ended
from farm.dispatch.cluster.nightly_starter import receivers_of
from farm.dispatch.notify import delivery
from farm.dispatch.notify.credentials import Credentials
from farm.dispatch.notify.delivery import Notice, find_receivers, send_notices
from farm.dispatch.pool.announce import Announcer
from farm.store.messages.notices import Message
from farm.store.store import Store, open_store

_devices = (f"R5CT{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def url(new_store: Callable[[str], str]) -> Iterator[str]:
    address = new_store("notices")
    yield address
    drop_database(address)


@pytest.fixture
def store(url: str, shorter_waits: None) -> Iterator[Store]:
    del shorter_waits
    with open_store(url) as opened:
        yield opened
        with psycopg.connect(**opened.connection_arguments(), autocommit=True) as connection:
            connection.execute("DELETE FROM procrastinate_jobs WHERE task_name = 'farm.notify'")


@pytest.fixture
def shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_WAITS_S", (0.01,))
    monkeypatch.setattr(delivery, "GRACE_S", 0.5)
    monkeypatch.setattr(delivery, "_LONGEST_S", 0.0)
    monkeypatch.setattr(task, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(worker, "_LOOK_S", 0.2)


@pytest.fixture
def device() -> str:
    return next(_devices)


@contextmanager
def farm(store: Store, url: str, folder: Path, answers: list[int]) -> Iterator[tuple[Config, Hook]]:
    """Yield the configuration of a shared farm with a receiver whose address and token are secrets."""
    with web_server(answers) as hook:
        (folder / "address").write_text(hook.url("/T0/hooksecret"))
        (folder / "token").write_text("tokensecret")
        (folder / "farm.toml").write_text(
            f'store = "{url}"\nartifacts = "file://{folder}/artifacts"\n'
            '[[notify.webhook]]\nurl_file = "address"\ntoken_file = "token"\n'
        )
        store.messages.require()
        yield load_config(folder / "farm.toml"), hook


@contextmanager
def agent(store: Store, config: Config) -> Iterator[MessageDelivery]:
    notices = NoticeTask(store, find_receivers(config.notify.webhook, config.notify.mail))
    one = MessageDelivery(store, recover=lambda: False, ttl_s=30, notices=notices)
    one.start()
    try:
        until(lambda: one.is_connected)
        yield one
    finally:
        one.stop(5)


def quarantine(store: Store, device: str) -> None:
    store.devices.record_health(HealthEvent(device, "gave_up", "quarantined", "no answer"))


def outcome(store: Store, device: str) -> str:
    return next(one.reason for one in store.devices.health_events(device, 9) if one.event == "notice")


def rows(store: Store) -> list[str]:
    """Return the jobs that send notices, as text."""
    with psycopg.connect(**store.connection_arguments()) as connection:
        query = "SELECT job::text FROM procrastinate_jobs AS job WHERE task_name = 'farm.notify'"
        return [str(row[0]) for row in connection.execute(query)]


def test_a_receiver_that_is_down_for_longer_than_the_command_gets_the_notice_once(
    store: Store, url: str, tmp_path: Path, device: str
) -> None:
    log = LogLines()
    # Two answers to the process that sees the quarantine, and two more to the agent.
    with farm(store, url, tmp_path, [503] * 4) as (config, hook):
        quarantine(store, device)
        Announcer(config, store).close()
        assert len(hook.requests) == 2
        [row] = rows(store)
        assert "secret" not in row, "the row names the receiver, and holds no secret"
        to = f"webhook 1 (http://{LOOPBACK}:{hook.port})"
        assert outcome(store, device).startswith(f"NOT SENT: {to}: ")
        assert outcome(store, device).endswith(
            "answers 503 Service Unavailable, 2 times; agents with this receiver try again"
        )
        with agent(store, config):
            until(lambda: outcome(store, device).endswith(f"; sent: {to}"))
            until(lambda: not rows(store))
            time.sleep(1)
        assert len(hook.requests) == 5
        assert len({headers["Idempotency-Key"] for _, headers, _ in hook.requests}) == 1
        assert {headers["Authorization"] for _, headers, _ in hook.requests} == {"Bearer tokensecret"}
    assert f"NOT NOTIFIED that {device} is quarantined" in log[0]


def test_a_notice_that_was_sent_is_not_sent_by_agents(store: Store, url: str, tmp_path: Path, device: str) -> None:
    with farm(store, url, tmp_path, []) as (config, hook), agent(store, config), agent(store, config):
        quarantine(store, device)
        announcers = [Announcer(config, store) for _ in range(2)]
        for one in announcers:
            one.close()
        assert rows(store) == []
        time.sleep(1)
        assert len(hook.requests) == 1
        assert outcome(store, device) == f"sent: webhook 1 (http://{LOOPBACK}:{hook.port})"


def test_the_notice_of_a_process_that_died_is_sent_once_by_one_of_two_agents(
    store: Store, url: str, tmp_path: Path, device: str
) -> None:
    with farm(store, url, tmp_path, [503, 503]) as (config, hook), ExitStack() as agents:
        quarantine(store, device)
        # The process dies between its claim and its first attempt.
        died = Announcer(config, store)
        assert len(store.quarantines.claim(died._queue)) == 1
        for _ in range(2):
            agents.enter_context(agent(store, config))
        until(lambda: outcome(store, device).startswith("sent: "))
        time.sleep(1)
        assert [json.loads(body)["device"]["id"] for body in hook.bodies] == [device] * 3


def test_a_notice_that_cannot_arrive_is_recorded_as_not_sent(
    store: Store, url: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogLines()
    monkeypatch.setattr(task, "_MOST_TRIES", 2)
    with farm(store, url, tmp_path, [503] * 9) as (config, hook):
        quarantine(store, device)
        store.quarantines.claim(Announcer(config, store)._queue)
        with agent(store, config):
            until(lambda: outcome(store, device).startswith("NOT SENT: "))
            until(lambda: not rows(store))
        assert len(hook.requests) == 2
    assert any("NOT SENT: webhook 1" in line for line in log)


def test_waits_for_a_receiver_grow_and_end_after_some_hours() -> None:
    waits = [retry_wait_s(tries) for tries in range(1, task._MOST_TRIES)]
    assert waits == sorted(waits)
    assert waits[-1] == 600
    assert 5 * 3600 < sum(waits) < 8 * 3600


def test_a_hostile_row_ends_no_worker(store: Store, url: str, tmp_path: Path, device: str) -> None:
    log = LogLines()
    with farm(store, url, tmp_path, []) as (config, hook), agent(store, config):
        [receiver] = find_receivers(config.notify.webhook, config.notify.mail)
        with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
            for arguments in ('{"message": 3}', '{"about": {"a": 1}, "message": {"body": "x"}}', "{}"):
                connection.execute(
                    "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW(%s, 'farm.notify', 0, NULL, NULL, %s::jsonb, NULL)"
                    "::procrastinate_job_to_defer_v1])",
                    (receiver.queue, arguments),
                )
        quarantine(store, device)
        store.quarantines.claim(Announcer(config, store)._queue)
        until(lambda: not rows(store))
        assert len(hook.requests) == 1
    assert len([line for line in log if "its row is unreadable" in line]) == 3


def test_a_notice_without_a_host_that_has_its_receiver_ends_after_a_day(store: Store, url: str, tmp_path: Path) -> None:
    log = LogLines()
    with farm(store, url, tmp_path, []) as (config, _):
        [receiver] = find_receivers(config.notify.webhook, config.notify.mail)
        notice = Notice(receiver, Message("{}"), "nightly run phones")
        assert store.messages.defer_notices([notice.queued()], 0.0) == [notice.key]
        assert store.messages.defer_notices([notice.queued()], 0.0) == [], "it is queued once"
        remove_ended(store)
        assert len(rows(store)) == 1
        with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
            connection.execute("UPDATE procrastinate_events SET at = at - interval '25 hours'")
        remove_ended(store)
        assert rows(store) == []
    assert log == ["NOT NOTIFIED of nightly run phones: no host has had the receiver for a day"]


def test_an_agent_sends_the_notices_of_its_nightly_runs(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nightly.toml"
    file.write_text(
        '[nightly]\nname = "n"\n[[notify.webhook]]\nurl_env = "NIGHTLY_HOOK"\ntemplate = "own.j2"\nwhen = "always"\n'
    )
    with farm(store, url, tmp_path, [503, 503]) as (_, hook):
        monkeypatch.setenv("NIGHTLY_HOOK", hook.url("/nightlysecret"))
        from farm.dispatch.nightly.plan import WebhookTable

        own = WebhookTable(url_env="NIGHTLY_HOOK", template=str(tmp_path / "own.j2"), when="always")
        [receiver] = find_receivers((own,), None)
        notice = Notice(receiver, Message('{"text": "n"}'), f"nightly run n {time.time_ns()}")
        store.messages.defer_notices([notice.queued()], 0.5)
        [failed] = send_notices([notice], store.messages)
        assert not failed.ok
        notices = NoticeTask(store, receivers_of(file))
        one = MessageDelivery(store, recover=lambda: False, ttl_s=30, notices=notices)
        one.start()
        until(lambda: len(hook.requests) == 3)
        until(lambda: not rows(store))
        one.stop(5)
        assert hook.bodies == [b'{"text": "n"}'] * 3
    assert Credentials((own,), None).get("NIGHTLY_HOOK").endswith("/nightlysecret")
