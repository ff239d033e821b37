"""Nightly runs started by agents: each once, by a single agent, in time or never. Real PostgreSQL and processes."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from log_lines import LogLines
from shared_rows import execute, facts
from waiting import until

from farm.base.config.settings import load_config
from farm.base.config.shared import NightlyConfig
from farm.base.errors import ConfigError, StoreError, UsageError
from farm.dispatch.cluster.nightly_starter import NightlyStarter, due_before, name_of
from farm.store.cluster.records import AgentId, NightlyStart
from farm.store.store import Store

_HOUR_MS = 3_600_000
SHARED = 'store = "postgresql://farm@db/farm"\nartifacts = "file:///mnt/farm"\n[agent]\n'
# Stub of `farm nightly`: it records its arguments, and runs for a given number of seconds.
STUB = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open(LOG, "a").write("stopped\\n"), os._exit(130)))
LOG, seconds = sys.argv[1], float(sys.argv[2])
inherited = {"FARM_SERVER", "FARM_TOKEN"} & {*os.environ}
open(LOG, "a").write(" ".join(["nightly", *sys.argv[4:], *inherited]) + "\\n")
time.sleep(seconds)
print("all is well", file=sys.stderr)
"""
_names = (f"night-{number}" for number in itertools.count())


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def nightly_run(
    hour: int, minute: int = 0, timezone: str = "UTC", days: tuple[int, ...] = tuple(range(7))
) -> NightlyConfig:
    return NightlyConfig(Path("nightly.toml"), hour, minute, timezone, days, 3600.0)


@pytest.mark.parametrize(
    ("one", "now", "due"),
    [
        (nightly_run(22), "2026-11-23T22:00:00+00:00", "2026-11-23T22:00:00+00:00"),
        (nightly_run(22), "2026-11-23T21:59:59+00:00", "2026-11-22T22:00:00+00:00"),
        (nightly_run(1, 30, "Europe/Berlin"), "2026-07-02T00:00:00+00:00", "2026-07-02T01:30:00+02:00"),
        (nightly_run(22, days=(0,)), "2026-11-29T12:00:00+00:00", "2026-11-23T22:00:00+00:00"),
        (nightly_run(22, days=(0,)), "2026-11-30T21:00:00+00:00", "2026-11-23T22:00:00+00:00"),
        # The clock is put forward over 2:30, and back over it: each time one nightly run.
        (nightly_run(2, 30, "Europe/Berlin"), "2026-03-29T12:00:00+00:00", "2026-03-29T03:30:00+02:00"),
        (nightly_run(2, 30, "Europe/Berlin"), "2026-10-25T12:00:00+00:00", "2026-10-25T02:30:00+02:00"),
    ],
)
def test_a_nightly_run_is_due_at_its_time_in_its_zone(one: NightlyConfig, now: str, due: str) -> None:
    assert due_before(one, ms(now)) == ms(due)


def test_farm_toml_says_when(tmp_path: Path) -> None:
    file = tmp_path / "farm.toml"
    file.write_text(
        f'{SHARED}nights = [{{file = "nights/phones.toml", at = "22:30", timezone = "Europe/Berlin", days = ["mon"]}}]'
    )
    [one] = load_config(file).agent.nights
    assert one == NightlyConfig(tmp_path / "nights/phones.toml", 22, 30, "Europe/Berlin", (0,), 3600.0)
    for wrong, key in (
        ('at = "25:00"', "at"),
        ('at = "22:00", timezone = "Mars"', "timezone"),
        ('at = "22:00", days = ["someday"]', "days"),
        ('at = "22:00", late = "2d"', "late"),
    ):
        file.write_text(f'{SHARED}nights = [{{file = "nightly.toml", {wrong}}}]')
        with pytest.raises(ConfigError, match=rf"agent\.nights\[0\]\.{key}"):
            load_config(file)


def test_a_nightly_run_without_a_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nightly.toml"
    with pytest.raises(UsageError, match="No such file"):
        name_of(file)
    for text in ("[nightly", "[nightly]\n", '[nightly]\nname = "../x"\n', "nightly = 3\n"):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"nightly\.toml"):
            name_of(file)


class Host:
    """Agent with one nightly run, which is due now or was `ago_s` before."""

    def __init__(self, store: Store, folder: Path, name: str, nightly_name: str, ago_s: float, seconds: float) -> None:
        self.store, self.name, self.nightly_run = store, name, nightly_name
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        (folder / "stub_nightly.py").write_text(STUB)
        self.log = folder / "log"
        (self.folder / "nightly.toml").write_text(f'[nightly]\nname = "{nightly_name}"\n')
        due = datetime.fromtimestamp(store.leases.now_ms() / 1000 - ago_s, UTC)
        file = self.folder / "farm.toml"
        file.write_text(f'{SHARED}nights = [{{file = "nightly.toml", at = "{due:%H:%M}"}}]')
        self.config = msgspec.structs.replace(load_config(file), state_dir=self.folder / "state")
        command = [sys.executable, str(folder / "stub_nightly.py"), str(self.log), str(seconds)]
        self.notes = LogLines()
        self.starter = NightlyStarter(self.config, store, command)

    def register(self, replaces: str = "") -> AgentId:
        agent = self.store.cluster.register(self.name, facts(self.name), 600.0, user="farm", replaces=replaces)
        self.starter.begin(agent)
        return agent

    def check(self) -> None:
        self.starter.check(self.nightly_run)

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def starts(self) -> list[NightlyStart]:
        return [one for one in self.store.cluster.nightly_runs.recent(1000) if one.name == self.nightly_run]

    def states(self) -> list[str]:
        return [start.state for start in self.starts()]

    def is_over(self) -> bool:
        """Return whether the newest start has an end in the store, recorded after the end of its process."""
        return self.starts()[0].state != "running"

    def remember(self, due_ms: int, state: str) -> None:
        """Let the nightly run have been started by another host."""
        row = "INSERT INTO nightly_start VALUES (%s, %s, %s, 'no-such-host', 't', 0, NULL, NULL, '')"
        execute(self.store, row, self.nightly_run, due_ms, state)


@pytest.fixture
def make_host(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Make agents of this test's nightly run, which inherits no server."""
    monkeypatch.setenv("FARM_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("FARM_TOKEN", "a token")
    name, made = next(_names), list[Host]()

    def make(host: str = "host", ago_s: float = 0.0, seconds: float = 0.1) -> Host:
        made.append(Host(store, tmp_path, f"{name}-{host}", name, ago_s, seconds))
        return made[-1]

    yield make
    for one in made:
        one.starter.stop()


@pytest.fixture
def hosts(make_host: Callable[..., Host]) -> list[Host]:
    """Two agents with the same nightly run, which was due a moment ago."""
    made = [make_host("one"), make_host("two")]
    for one in made:
        one.register()
    return made


def test_two_schedulers_start_a_nightly_run_once(hosts: list[Host]) -> None:
    ready = threading.Barrier(8)

    def ask(number: int) -> None:
        ready.wait()
        for _ in range(5):
            hosts[number % 2].check()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    until(hosts[0].is_over)
    for host in hosts:
        host.check()
    assert hosts[0].said() == ["nightly"]
    [start] = hosts[0].starts()
    assert (start.state, start.exit_code) == ("ended", 0)
    assert start.agent in {host.name for host in hosts}


def test_a_nightly_run_whose_first_answer_was_lost_is_started_at_the_next_look(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, nightly_runs = hosts[0], hosts[0].store.cluster.nightly_runs
    begin = nightly_runs.begin

    def lose_answer(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        raise StoreError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(nightly_runs, "begin", lose_answer)
        with pytest.raises(StoreError):
            host.check()
    for one in (hosts[1], host, host):
        one.check()
    until(host.is_over)
    host.check()
    assert host.said() == ["nightly"]
    [start] = host.starts()
    assert (start.state, start.agent) == ("ended", host.name)


def test_a_host_that_was_away_does_not_start_last_night_s(make_host: Callable[..., Host]) -> None:
    host = make_host(ago_s=2 * 3600.0)
    host.register()
    host.check()
    assert (host.said(), host.starts()) == ([], []), "a nightly run that is new was not missed"
    due_ms = due_before(host.config.agent.nights[0], host.store.leases.now_ms())
    host.remember(due_ms - 24 * _HOUR_MS, "ended")
    host.check()
    host.check()
    assert (host.said(), host.states()) == ([], ["missed", "ended"])
    assert any("missed" in note for note in host.notes)


def test_a_clock_that_is_wrong_starts_nothing(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock of this machine is a day behind, or ahead: the database's clock decides.
    for wrong_s in (-86_400, 86_400):
        monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: 1.8e9 + wrong_s)
        hosts[0].check()
    until(hosts[0].is_over)
    assert hosts[0].states() == ["ended"]


def test_a_nightly_run_is_not_started_beside_the_one_before(make_host: Callable[..., Host]) -> None:
    first, second = make_host(ago_s=120.0, seconds=60.0), make_host("other")
    first.register()
    first.check()
    until(first.said)
    second.register()
    second.check()
    assert second.said() == ["nightly"]
    assert first.states() == ["skipped", "running"]


def test_the_next_life_of_an_agent_goes_on_with_its_nightly_run(make_host: Callable[..., Host]) -> None:
    host = make_host(seconds=60.0)
    agent = host.register()
    host.check()
    until(host.said)
    host.starter.stop()
    assert host.states() == ["stopped"]
    again = make_host()
    again.register(replaces=agent.token)
    until(again.is_over)
    assert again.said() == ["nightly", "stopped", "nightly --resume"]
    [start] = again.starts()
    assert (start.state, start.exit_code) == ("ended", 0)


def test_a_nightly_run_whose_host_is_gone_is_lost_and_the_next_one_runs(make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.remember(host.store.leases.now_ms() - 24 * _HOUR_MS, "running")
    host.register()
    host.check()
    until(host.is_over)
    host.store.cluster.nightly_runs.lose()
    assert host.states() == ["ended", "lost"]


def test_how_a_nightly_run_fails_is_seen(make_host: Callable[..., Host]) -> None:
    host = make_host()
    # The real thing, which has nothing to run in that file.
    host.starter = NightlyStarter(host.config, host.store)
    host.register()
    host.check()
    until(host.is_over)
    [start] = host.starts()
    assert (start.state, start.exit_code) == ("ended", 2)
    assert "[[run]] is missing" in start.why
    assert any("exit code 2" in note for note in host.notes)
