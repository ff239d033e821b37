"""Hosts of a shared farm with virtual devices, and a person's machine that has every bundle of `smoke` already."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from three_hosts import ThreeHosts
from waiting import until

from farm.base.processes import Supervisor
from farm.store.store import open_store

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

    def you(self, *arguments: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run `farm` on the person's machine."""
        return self.farm("you", *arguments, timeout_s=120, code=code)

    def detached(self, *arguments: str) -> str:
        """Submit a run, and return its id."""
        done = self.you(*SMOKE, "--detach", "--json", *arguments, code=0)
        return str(json.loads(done.stdout)["run"])

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(query, values).fetchall()  # type: ignore[arg-type]

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait until `condition` holds. Raises AssertionError with the output of the agents after `seconds`."""
        until(condition, lambda: f"{what}\n{self.logs()}", seconds)

    def registered(self, *names: str) -> None:
        """Wait until agents are there with their devices."""

        def are_there() -> bool:
            with open_store(self.url) as store:
                found = {one.name: one for one in store.cluster.agents() if one.alive}
            return all(name in found and found[name].facts.devices for name in names)

        self.until(are_there, f"{names} are registered")

    def sessions(self, name: str) -> list[Path]:
        """Return the folders of sessions that runners have on the device of a host."""
        return list((self.folder / name / f"devices/virtual-{name}-0/data/local/tmp/farm").glob("run-*"))


@contextmanager
def agent_hosts(folder: Path, url: str, toolchain: Path, cache: Path) -> Iterator[AgentHosts]:
    """Yield no host yet; everything is ended afterwards."""
    with Supervisor() as supervisor:
        hosts = AgentHosts(folder, url, toolchain, supervisor)
        hosts.begin(cache)
        try:
            yield hosts
        finally:
            hosts.kill_agents()
