"""Nightly runs started by agents: each once, by a single agent, in time or never. Real PostgreSQL and processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from log_lines import LogLines
from store_template import drop_database
from waiting import ends, until

from farm.base.config.settings import Config, load_config
from farm.base.config.shared import NightlyConfig
from farm.base.errors import ConfigError, StoreError, UsageError
from farm.dispatch.cluster.nightly_starter import NightlyStarter, due_before, name_of, nightly_lines
from farm.store.cluster.records import AgentFacts, AgentId, NightlyStart
from farm.store.protocol import PROTOCOL
from farm.store.store import Store, open_store

_HOUR_MS = 3_600_000
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
    shared = 'store = "postgresql://farm@db/farm"\nartifacts = "file:///mnt/farm"\n[agent]\n'
    file.write_text(
        f'{shared}nights = [{{file = "nights/phones.toml", at = "22:30", timezone = "Europe/Berlin", days = ["mon"]}}]'
    )
    [one] = load_config(file).agent.nights
    assert one == NightlyConfig(tmp_path / "nights/phones.toml", 22, 30, "Europe/Berlin", (0,), 3600.0)
    for wrong, key in (
        ('at = "25:00"', "at"),
        ('at = "22:00", timezone = "Mars"', "timezone"),
        ('at = "22:00", days = ["someday"]', "days"),
        ('at = "22:00", late = "2d"', "late"),
    ):
        file.write_text(f'{shared}nights = [{{file = "nightly.toml", {wrong}}}]')
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


def test_what_became_of_nightly_runs_is_a_line_each() -> None:
    ended = NightlyStart("phones", ms("2026-11-23T22:00:00+00:00"), "ended", "lab-1", 0, 1, 2, "no such suite")
    missed = msgspec.structs.replace(ended, state="missed", exit_code=None, why="nobody was there")
    first, second = nightly_lines([ended, missed])
    assert first.startswith("nightly run phones of 2026-11-2")
    assert "ended on lab-1 exit code 2 (no such suite)" in first
    assert "missed on lab-1 (nobody was there)" in second


@pytest.fixture(scope="module")
def url(new_store: Callable[[str], str]) -> Iterator[str]:
    address = new_store("nightly_runs")
    yield address
    drop_database(address)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


class Host:
    """Agent with one nightly run, which is due now or was `ago_s` before."""

    def __init__(
        self, store: Store, folder: Path, url: str, name: str, nightly_name: str, *, ago_s: float, seconds: float = 0.5
    ) -> None:
        self.store, self.name, self.nightly_run = store, name, nightly_name
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        (folder / "stub_nightly.py").write_text(STUB)
        self.log = folder / "log"
        self.file = self.folder / "farm.toml"
        (self.folder / "nightly.toml").write_text(f'[nightly]\nname = "{nightly_name}"\n')
        due = datetime.fromtimestamp(store.cluster.nightly_runs.now_ms() / 1000 - ago_s, UTC)
        self.file.write_text(
            f'store = "{url}"\nartifacts = "file://{folder}/artifacts"\n[paths]\nstate = "state"\n[agent]\n'
            f'nights = [{{file = "nightly.toml", at = "{due:%H:%M}"}}]\n'
        )
        command = [sys.executable, str(folder / "stub_nightly.py"), str(self.log), str(seconds)]
        self.notes = LogLines()
        self.starter = NightlyStarter(self.config(), store, command)
        self.agent: AgentId | None = None

    def config(self) -> Config:
        return msgspec.structs.replace(load_config(self.file), state_dir=self.folder / "state")

    def register(self, replaces: str = "", ttl_s: float = 600.0) -> AgentId:
        facts = AgentFacts(host=self.name, pid=os.getpid(), version="1", protocol=PROTOCOL)
        self.agent = self.store.cluster.register(self.name, facts, ttl_s, user="farm", replaces=replaces)
        self.starter.begin(self.agent)
        return self.agent

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def starts(self) -> list[NightlyStart]:
        return [one for one in self.store.cluster.nightly_runs.recent(1000) if one.name == self.nightly_run]

    def is_over(self) -> bool:
        """Return whether the newest start has an end in the store, recorded after the end of its process."""
        return self.starts()[0].state != "running"


@pytest.fixture
def hosts(store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Two agents with the same nightly run, which was due a moment ago; it inherits no server."""
    monkeypatch.setenv("FARM_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("FARM_TOKEN", "a token")
    name = next(_names)
    made = [Host(store, tmp_path, url, f"{name}-host-{n}", name, ago_s=0.0) for n in range(2)]
    for one in made:
        one.register()
    yield made
    for one in made:
        one.starter.stop()


def test_two_schedulers_start_a_nightly_run_once(hosts: list[Host]) -> None:
    ready = threading.Barrier(8)

    def ask(host: Host) -> None:
        ready.wait()
        for _ in range(5):
            host.starter.check(host.nightly_run)

    threads = [threading.Thread(target=ask, args=(hosts[n % 2],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(hosts[0].is_over)
    for host in hosts:
        host.starter.check(host.nightly_run)
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
            host.starter.check(host.nightly_run)
    for one in (hosts[1], host, host):
        one.starter.check(host.nightly_run)
    until(host.is_over)
    host.starter.check(host.nightly_run)
    assert host.said() == ["nightly"]
    [start] = host.starts()
    assert (start.state, start.agent) == ("ended", host.name)


def test_a_host_that_was_away_does_not_start_last_night_s(store: Store, url: str, tmp_path: Path) -> None:
    name = next(_names)
    host = Host(store, tmp_path, url, f"{name}-host", name, ago_s=2 * 3600.0)
    host.register()
    host.starter.check(name)
    assert (host.said(), host.starts()) == ([], []), "a nightly run that is new was not missed"
    due_ms = due_before(host.config().agent.nights[0], store.cluster.nightly_runs.now_ms())
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        before = "INSERT INTO nightly_start VALUES (%s, %s, 'ended', 'x', 't', 0, 0, 0, '')"
        connection.execute(before, (name, due_ms - 24 * _HOUR_MS))
    host.starter.check(name)
    host.starter.check(name)
    assert host.said() == []
    assert [start.state for start in host.starts()] == ["missed", "ended"]
    assert [note for note in host.notes if "missed" in note] != []


def test_a_clock_that_is_wrong_starts_nothing(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock of this machine is a day behind, or ahead: the database's clock decides.
    for wrong_s in (-86_400, 86_400):
        monkeypatch.setattr(time, "time", lambda wrong_s=wrong_s: 1.8e9 + wrong_s)
        hosts[0].starter.check(hosts[0].nightly_run)
    until(hosts[0].is_over)
    assert [start.state for start in hosts[0].starts()] == ["ended"]


def test_a_nightly_run_is_not_started_beside_the_one_before(store: Store, url: str, tmp_path: Path) -> None:
    name = next(_names)
    first = Host(store, tmp_path, url, f"{name}-host", name, ago_s=120.0, seconds=60.0)
    first.register()
    first.starter.check(name)
    until(first.said)
    second = Host(store, tmp_path, url, f"{name}-other", name, ago_s=0.0)
    second.register()
    second.starter.check(name)
    assert second.said() == ["nightly"]
    assert [start.state for start in first.starts()] == ["skipped", "running"]
    first.starter.stop()
    second.starter.stop()


def test_the_next_life_of_an_agent_goes_on_with_its_nightly_run(store: Store, url: str, tmp_path: Path) -> None:
    name = next(_names)
    host = Host(store, tmp_path, url, f"{name}-host", name, ago_s=0.0, seconds=60.0)
    agent = host.register()
    host.starter.check(name)
    until(host.said)
    host.starter.stop()
    assert [start.state for start in host.starts()] == ["stopped"]
    again = Host(store, tmp_path, url, f"{name}-host", name, ago_s=0.0, seconds=0.1)
    again.register(replaces=agent.token)
    until(again.is_over)
    assert again.said() == ["nightly", "stopped", "nightly --resume"]
    [start] = again.starts()
    assert (start.state, start.exit_code) == ("ended", 0)
    again.starter.stop()


def test_a_nightly_run_whose_host_is_gone_is_lost_and_the_next_one_runs(store: Store, url: str, tmp_path: Path) -> None:
    name = next(_names)
    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        due_ms = store.cluster.nightly_runs.now_ms() - 24 * _HOUR_MS
        left = "INSERT INTO nightly_start VALUES (%s, %s, 'running', 'no-such-host', 't', 0, NULL, NULL, '')"
        connection.execute(left, (name, due_ms))
    host = Host(store, tmp_path, url, f"{name}-host", name, ago_s=0.0, seconds=0.1)
    host.register()
    host.starter.check(name)
    until(host.is_over)
    store.cluster.nightly_runs.lose()
    assert [start.state for start in host.starts()] == ["ended", "lost"]
    host.starter.stop()


def test_how_a_nightly_run_fails_is_seen(store: Store, url: str, tmp_path: Path) -> None:
    name = next(_names)
    host = Host(store, tmp_path, url, f"{name}-host", name, ago_s=0.0)
    # The real thing, which has nothing to run in that file.
    host.starter = NightlyStarter(host.config(), store)
    host.register()
    host.starter.check(name)
    until(host.is_over)
    [start] = host.starts()
    assert (start.state, start.exit_code) == ("ended", 2)
    assert "[[run]] is missing" in start.why
    assert any("exit code 2" in note for note in host.notes)
    host.starter.stop()


def test_a_killed_agent_takes_its_nightly_run_with_it(tmp_path: Path) -> None:
    # Otherwise the restarted agent would continue the nightly run beside the running process.
    mark = tmp_path / "pid"
    code = (
        "import signal\n"
        "from farm.base.processes import Supervisor\n"
        "child = Supervisor().spawn(['/bin/sleep', '60'], name='night')\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid))\n"
        "signal.pause()\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code])
    child = until(lambda: int(mark.read_text() or 0) if mark.exists() else 0)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert ends(child)
