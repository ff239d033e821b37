"""Two hosts with virtual devices and a build host, and machines of people, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from farm_home import FarmHome
from forked_command import Program, start
from waiting import until

from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.virtual.boot import attach_device, start_device
from farm.devices.virtual.tree import BUILDS
from farm.store.store import open_store

# Two hosts with virtual devices and a build host, and machines of people: everything but the cables is the real
# thing.
#
# Compiler, simulator, adb servers, virtual devices, `farm lab agent`, PostgreSQL, `farm run`. Hosts are processes
# with folders of their own on this machine. tools/three_hosts.py runs a suite on them.


SOCS = ("SM8650", "SM8750")


SMOKE = ("run", "--soc", "SM8650", "--suite", "smoke")


@dataclass
class AgentHosts:
    """Hosts, by name, that share `url` and a folder; and people's machines, which have no devices."""

    folder: Path
    url: str
    toolchain: Path
    """With the simulator and the native runner, which every host has; no bundle."""
    supervisor: Supervisor
    cache: Path | None = None
    """Cache with bundles for the machine `you`; without it that machine has a cache of its own."""
    hashes: Path | None = None
    """Folder with hashes of the installed files, equal on all machines; without it each machine makes its own."""
    agents: dict[str, Program] = field(default_factory=dict)
    servers: dict[str, AdbServer] = field(default_factory=dict)

    def home(self, name: str, *, shared: bool = True) -> Path:
        """Return the folder of a machine, made with an empty cache when it is new."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            shutil.copytree(self.toolchain, folder / "cache", symlinks=True)
            if self.hashes is not None and self.hashes.is_dir():
                # Other processes write there at the same time; a hash that is missing is made.
                with contextlib.suppress(shutil.Error):
                    shutil.copytree(self.hashes, folder / "cache" / "hashes")
            (self.folder / "artifacts").mkdir(exist_ok=True)
            if shared:
                text = f'store = "{self.url}"\nartifacts = "file://{self.folder}/artifacts"\n[build]\nbuilders = 2\n'
                (folder / "farm.toml").write_text(text)
        return folder

    def env(self, name: str) -> dict[str, str]:
        """Return the variables of a machine's processes."""
        if name not in self.servers:
            self.servers[name] = start_adb_server(self.supervisor, self.folder / name / "adb")
        more = {"FARM_CACHE_DIR": str(self.cache)} if name == "you" and self.cache is not None else {}
        return {**self.machine(name).env, "ANDROID_ADB_SERVER_PORT": str(self.servers[name].port), **more}

    def machine(self, name: str) -> FarmHome:
        """Return the folders of a machine as a home of `farm`."""
        folder = self.folder / name
        return FarmHome(folder / "cache", folder / "state", folder)

    def attach(self, name: str, socs: Sequence[str]) -> None:
        """Attach a virtual device of each SoC to a host, with serials that no other host has."""
        self.home(name)
        self.env(name)
        for number, soc in enumerate(socs):
            folder = self.folder / name / "devices"
            child = start_device(self.supervisor, f"virtual-{name}-{number}", soc, folder, BUILDS[0])
            attach_device(self.servers[name], child)

    def start_agent(self, name: str, *options: str) -> None:
        """Start `farm lab agent` on a host."""
        folder = self.home(name)
        words = [sys.executable, "-m", "farm.cli.main", "lab", "agent", "--name", name, *options]
        self.agents[name] = start(words, env=self.env(name), cwd=folder, log=folder / "agent.log")

    def host(self, name: str, *socs: str) -> None:
        """Attach devices to a host, and start its agent."""
        self.attach(name, socs or ("SM8650",))
        self.start_agent(name)

    def registered(self, *names: str, seconds: float = 60) -> None:
        """Wait until agents are there with their devices or toolchains."""

        def are_there() -> bool:
            with open_store(self.url) as store:
                found = {one.name: one.facts for one in store.cluster.agents() if one.alive}
            return all(name in found and (found[name].devices or found[name].toolchains) for name in names)

        self.until(are_there, f"{names} are registered", seconds)

    def stop_agents(self) -> dict[str, int]:
        """Stop all agents as systemd does, and return their exit codes."""
        for process in self.agents.values():
            process.send_signal(signal.SIGTERM)
        codes = {name: process.wait(60) for name, process in self.agents.items()}
        self.agents.clear()
        return codes

    def logs(self) -> str:
        """Return the ends of the agents' logs."""
        texts = {name: (self.folder / name / "agent.log").read_text() for name in self.agents}
        return "".join(f"\n--- {name}\n{text[-4000:]}" for name, text in texts.items())

    def kill_agents(self) -> None:
        """End all agents at once."""
        for process in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def farm(
        self, name: str, *arguments: str, timeout_s: float = 600, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` on a machine. Raises AssertionError for an exit code other than `code`; None allows any."""
        self.home(name, shared=name != "alone")
        return self.machine(name).farm(*arguments, env=self.env(name), timeout_s=timeout_s, code=code)

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

    def sessions(self, name: str) -> list[Path]:
        """Return the folders of sessions that runners have on the device of a host."""
        return list((self.folder / name / f"devices/virtual-{name}-0/data/local/tmp/farm").glob("run-*"))

    def verdicts(self, run: dict[str, Any], *, shared: bool) -> dict[str, tuple[str, ...]]:
        """Return the result of each job of a run from the store: verdict, stage, cause, known issue and figures."""
        url = self.url if shared else str(self.folder / "alone" / "state" / "farm.db")
        with open_store(url, readonly=True) as store:
            view = store.runs.view(run["id"])
        found = {}
        for job in view.jobs:
            last = job.attempts[-1]
            worst = sorted({violation for one in last.comparisons for violation in one.violations})
            found[job.id] = (str(last.verdict), str(last.stage), str(last.cause), last.known_issue, *worst)
        return found


@contextlib.contextmanager
def agent_hosts(
    folder: Path, url: str, toolchain: Path, cache: Path | None = None, hashes: Path | None = None
) -> Iterator[AgentHosts]:
    """Yield the machine `you` and no host yet; everything is ended afterwards."""
    with Supervisor() as supervisor:
        hosts = AgentHosts(folder, url, toolchain, supervisor, cache, hashes)
        hosts.home("you")
        try:
            yield hosts
        finally:
            hosts.kill_agents()


@contextlib.contextmanager
def three_hosts(
    folder: Path, url: str, toolchain: Path, socs: Sequence[str] = SOCS, hashes: Path | None = None
) -> Iterator[AgentHosts]:
    """Yield two hosts with a device of each SoC and a build host, all registered; everything is ended afterwards."""
    with agent_hosts(folder, url, toolchain, hashes=hashes) as hosts:
        hosts.start_agent("builder", "--build", "--no-devices")
        for name in ("left", "right"):
            hosts.host(name, *socs)
        hosts.registered("builder", "left", "right", seconds=90)
        yield hosts


def run_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON of `farm run --json`."""
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def selection(suite: str, keyword: str, socs: Sequence[str]) -> list[str]:
    """Return the arguments of `farm run` that choose the jobs."""
    return ["--suite", suite, *(["-k", keyword] if keyword else []), *(word for soc in socs for word in ("--soc", soc))]
