"""Hosts of a shared farm with virtual devices, and a person's machine that has every bundle of `smoke` already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
from three_hosts import ThreeHosts
from waiting import until

from farm.base.processes import Supervisor
from farm.devices.virtual.faults import Fault, inject
from farm.store.cluster.records import Agent
from farm.store.store import open_store
from farm.store.view import RunView

SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke")


class AgentHosts(ThreeHosts):
    """Hosts by name, each with one virtual device `virtual-NAME-0` by default."""

    def begin(self, cache: Path) -> None:
        """Make the machine of a person, with the bundles in `cache`."""
        self.cache = cache
        self.home("you")

    def env(self, name: str) -> dict[str, str]:
        """Return the variables of a machine's processes; a person's machine uses the cache with the bundles."""
        more = {"FARM_CACHE_DIR": str(self.cache)} if name == "you" else {}
        return {**super().env(name), **more}

    def host(self, name: str, *socs: str) -> None:
        """Attach devices to a host, and start its agent."""
        self.attach(name, socs or ("SM8650",))
        self.start_agent(name)

    def you(self, *arguments: str, timeout_s: float = 120, code: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run `farm` on the person's machine."""
        return self.farm("you", *arguments, timeout_s=timeout_s, code=code)

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run `farm` on the person's machine in the background."""
        process = subprocess.Popen(
            [sys.executable, "-m", "farm.cli.main", *arguments],
            cwd=self.folder / "you",
            env=self.env("you"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def detached(self, *arguments: str) -> str:
        """Submit a run, and return its id."""
        done = self.you(*SMOKE, "--detach", "--json", *arguments, code=0)
        return str(json.loads(done.stdout)["run"])

    def finished(self, run_id: str, timeout_s: float = 90) -> RunView:
        """Return a run once it is over."""
        ended = "select 1 from run where id = %s and exit_code is not null"
        self.until(lambda: self.rows(ended, run_id), f"{run_id} is over", timeout_s)
        return self.view(run_id)

    def view(self, run_id: str) -> RunView:
        with open_store(self.url, readonly=True) as store:
            return store.runs.view(run_id)

    def agents_seen(self) -> list[Agent]:
        with open_store(self.url) as store:
            return store.cluster.agents()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the database, over one connection."""
        return self._database.execute(query, values).fetchall()  # type: ignore[arg-type]

    @cached_property
    def _database(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url, autocommit=True)

    def close(self) -> None:
        """End the connection to the database, if there is one."""
        if "_database" in self.__dict__:
            self._database.close()

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait until `condition` holds. Raises AssertionError with the output of the agents after `seconds`."""
        until(condition, lambda: f"{what}\n{self.logs()}", seconds)

    def registered(self, *names: str) -> None:
        """Wait until agents are there with their devices."""

        def are_there() -> bool:
            found = {one.name: one for one in self.agents_seen() if one.alive}
            return all(name in found and found[name].facts.devices for name in names)

        self.until(are_there, f"{names} are registered")

    def break_device(self, name: str, fault: Fault) -> None:
        inject(self.folder_on_device(name), fault)

    def printed(self, name: str) -> str:
        """Return everything that an agent printed."""
        return (self.folder / name / "agent.log").read_text()

    def sessions(self, name: str) -> list[Path]:
        """Return the folders of sessions that runners have on the device of a host."""
        return list((self.folder_on_device(name) / "data/local/tmp/farm").glob("run-*"))

    def folder_on_device(self, name: str) -> Path:
        return self.folder / name / "devices" / f"virtual-{name}-0"


@contextmanager
def agent_hosts(folder: Path, url: str, toolchain: Path, cache: Path) -> Iterator[AgentHosts]:
    """Yield no host yet; everything is ended afterwards."""
    with Supervisor() as supervisor:
        hosts = AgentHosts(folder, url, toolchain, supervisor)
        hosts.begin(cache)
        try:
            yield hosts
        finally:
            hosts.close()
            hosts.kill_agents()
