"""Notices of a shared farm: in spite of dead processes and absent receivers, each once. Real PostgreSQL and servers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from log_lines import LogLines
from receivers import LOOPBACK, Hook, web_server
from shared_rows import execute
from stores import drop_database
from waiting import until

from farm.base.config.settings import load_config
from farm.devices.device import HealthEvent
from farm.dispatch.cluster import delivery as task
from farm.dispatch.cluster import delivery as worker
from farm.dispatch.cluster.delivery import MessageDelivery, NoticeTask, remove_ended, retry_wait_s
from farm.dispatch.cluster.nightly_starter import receivers_of
from farm.dispatch.nightly.plan import WebhookTable
from farm.dispatch.notify import delivery, quarantine
from farm.dispatch.notify.delivery import Notice, find_receivers, send_notices
from farm.dispatch.notify.quarantine import Announcer
from farm.store.messages.messages import Message, NoticeArguments
from farm.store.store import Store, open_store

_devices = (f"R5CT{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def url(new_store: Callable[[str], str]) -> Iterator[str]:
    address = new_store("notices")
    yield address
    drop_database(address)


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(delivery, "_WAITS_S", (0.01,))
    monkeypatch.setattr(delivery, "GRACE_S", 0.5)
    monkeypatch.setattr(quarantine, "GRACE_S", 0.5)
    monkeypatch.setattr(delivery, "_LONGEST_S", 0.0)
    monkeypatch.setattr(task, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(worker, "_LOOK_S", 0.2)
    with open_store(url) as opened:
        opened.messages.require()
        yield opened
        execute(opened, "DELETE FROM procrastinate_jobs WHERE task_name = 'farm.notify'")


class Farm:
    """Shared farm with one device, and a receiver whose address and token are secrets."""

    def __init__(self, store: Store, url: str, hook: Hook, folder: Path) -> None:
        self.store, self.hook, self.device = store, hook, next(_devices)
        self.to = f"webhook 1 (http://{LOOPBACK}:{hook.port})"
        (folder / "address").write_text(hook.url("/T0/hooksecret"))
        (folder / "token").write_text("tokensecret")
        (folder / "farm.toml").write_text(
            f'store = "{url}"\nartifacts = "file://{folder}/artifacts"\n'
            '[[notify.webhook]]\nurl_file = "address"\ntoken_file = "token"\n'
        )
        self.config = load_config(folder / "farm.toml")
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
        one = MessageDelivery(self.store, recover=lambda: False, ttl_s=30, notices=notices)
        one.start()
        try:
            until(lambda: one.is_connected)
            yield
        finally:
            one.stop(5)


@pytest.fixture
def make_farm(store: Store, url: str, tmp_path: Path) -> Iterator[Callable[..., Farm]]:
    """Function that makes a farm whose receiver gives these answers first."""
    with ExitStack() as servers:
        yield lambda *answers: Farm(store, url, servers.enter_context(web_server(list(answers))), tmp_path)


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
    monkeypatch.setattr(task, "_MOST_TRIES", 2)
    log, farm = LogLines(), make_farm(*[503] * 9)
    farm.quarantine_and_die()
    with farm.agent():
        until(lambda: farm.outcome().startswith("NOT SENT: "))
        until(lambda: not farm.rows())
    assert len(farm.hook.requests) == 2
    assert any("NOT SENT: webhook 1" in line for line in log)


def test_waits_for_a_receiver_grow_and_end_after_some_hours() -> None:
    waits = [retry_wait_s(tries) for tries in range(1, task._MOST_TRIES)]
    assert waits == sorted(waits)
    assert 5 * 3600 < sum(waits) < 8 * 3600


def test_a_hostile_row_ends_no_worker(make_farm: Callable[..., Farm]) -> None:
    log, farm = LogLines(), make_farm()
    with farm.agent():
        for arguments in ('{"message": 3}', '{"about": {"a": 1}, "message": {"body": "x"}}', "{}"):
            execute(
                farm.store,
                "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW(%s, 'farm.notify', 0, NULL, NULL, %s::jsonb, NULL)"
                "::procrastinate_job_to_defer_v1])",
                farm.receivers[0].queue,
                arguments,
            )
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
