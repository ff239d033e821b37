"""A shared farm that only compiles: a real store, build hosts with caches of their own, runs that lack bundles."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import made
import msgspec
from log_lines import LogLines
from shared_rows import facts, submit
from waiting import until

from farm.base.config.settings import Config, load_config
from farm.builds.bundles.key import bundle_key
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Toolchain
from farm.dispatch.cluster.agent.builds import BuildHost
from farm.dispatch.cluster.client.submit import new_builds
from farm.dispatch.cluster.files import upload_sources
from farm.policy.situation import Priority
from farm.store.cluster.records import AgentId, Build, NewShard, PlannedJob
from farm.store.objects.objects import Objects, open_objects
from farm.store.store import Store, open_store
from farm.suites.suite import InputSpec, Job

OPS = """
import os, pathlib, signal, time, torch
class Refuses(torch.nn.Module):
    def forward(self, x):
        print("about to refuse, password:", os.environ.get("PGPASSWORD"))
        raise ValueError("two\\nlines")
class Slow(torch.nn.Module):
    def __init__(self, mark, seconds):
        super().__init__()
        # As long, or until it may go on.
        pathlib.Path(mark).touch()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not pathlib.Path(mark + "-go").exists():
            time.sleep(0.02)
    def forward(self, x):
        return torch.relu(x)
class DiesOnce(torch.nn.Module):
    # Kills its builder as often as there are marks.
    def __init__(self, folder):
        super().__init__()
        for mark in sorted(pathlib.Path(folder).glob("die-*"))[:1]:
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    def forward(self, x):
        return torch.relu(x)
"""
_seeds = itertools.count(time.time_ns() % 2**40)


def made_job(module: str = "torch.nn:ReLU", args: tuple[object, ...] = (), folder: Path | None = None) -> Job:
    """Return a job whose bundle exists nowhere yet."""
    inputs = (InputSpec((1, 4), seed=next(_seeds)),)
    return made.job(
        f"case{next(_seeds)}", suite=folder.name if folder else "made", backend="xnnpack", precision="fp32",
        module=module, inputs=inputs, args=args, folder=str(folder or ""),
    )  # fmt: skip


@dataclass
class Submitted:
    """A run that waits for its bundles."""

    run_id: str
    jobs: list[Job]
    keys: list[str]


@dataclass
class RunningHost:
    """A build host in this process."""

    host: BuildHost
    agent: AgentId
    config: Config
    notes: list[str]


@dataclass
class BuildFarm:
    """Farm with build hosts: its store and the files of its machines."""

    store: Store
    hosts: Store
    """The store as build hosts sign in to it."""
    hosts_url: str
    objects: Objects
    file: Path
    caches: Path
    template: Path
    tools: Toolchain

    def config(self, machine: str) -> Config:
        """Return the configuration of a machine, whose cache has no bundles yet."""
        cache = self.caches / machine
        if not cache.exists():
            for part in ("native", "sdk", "hashes", "toolchains", "distributions", "edited"):
                if (self.template / part).is_dir():
                    shutil.copytree(self.template / part, cache / part, symlinks=True)
        config = load_config(self.file)
        return msgspec.structs.replace(config, cache_dir=cache, state_dir=self.caches / f"{machine}-state", builders=1)

    def suite(self, name: str = "ops") -> Path:
        """Return the folder of a user's suite."""
        folder = self.file.parent / name
        folder.mkdir(exist_ok=True)
        (folder / "ops.py").write_text(OPS)
        (folder / "suite.toml").write_text(f'[suite]\nname = "{name}"\n')
        return folder

    def submit(self, jobs: Sequence[Job], user: str = "ada", priority: Priority = Priority.PERSON) -> Submitted:
        """Submit a run that has one shard a job, and lacks all of its bundles."""
        planned = [PlannedJob(job, bundle_key(job, self.tools.versions), cached=False) for job in jobs]
        builds = new_builds(planned, self.tools, "xnnpack", upload_sources(self.objects, jobs))
        shards = [NewShard("SM8650", (one,), 1.0, number) for number, one in enumerate(planned)]
        run_id = submit(self.store, shards, user, priority, builds)
        return Submitted(run_id, list(jobs), [one.key for one in planned])

    def await_builds(self, keys: Sequence[str], *states: str, timeout_s: float = 300.0) -> dict[str, Build]:
        """Return the builds of `keys` as soon as each is in any of `states`."""
        wanted = states or ("built", "failed")
        return until(lambda: self._in(keys, wanted), lambda: self._progress(keys), timeout_s)

    def _progress(self, keys: Sequence[str]) -> str:
        logs = (f"{path.name}: {path.read_text()}" for path in sorted(self.file.parent.glob("*.log")))
        return "\n".join((str(self.store.cluster.build_of(keys)), *logs))

    def _in(self, keys: Sequence[str], states: Sequence[str]) -> dict[str, Build] | None:
        found = self.store.cluster.build_of(keys)
        return found if all(key in found and found[key].state in states for key in keys) else None

    @contextmanager
    def host(self, name: str) -> Iterator[RunningHost]:
        """Yield a build host that claims, in this process."""
        config, notes = self.config(name), LogLines("farm.dispatch.cluster.agent")
        host = BuildHost(config, self.hosts, self.objects)
        with ExitStack() as stack:
            stack.callback(notes.close)
            stack.callback(host.stop)
            host.toolchains.look()
            tools = {"toolchains": host.toolchains.ids, "offered": host.toolchains.offered}
            agent = self.hosts.cluster.register(name, facts(name, 0, **tools), 600.0, user=self.hosts.user)
            stack.callback(self.hosts.cluster.leave, agent)
            host.begin(agent)
            yield RunningHost(host, agent, config, notes)


@contextmanager
def build_farm(url: str, folder: Path, farm_cache: Path, hosts_url: str = "") -> Iterator[BuildFarm]:
    """Yield a farm whose store is at `url`, for build hosts at `hosts_url`, with everything else below `folder`."""
    hosts_url = hosts_url or url
    file = folder / "farm.toml"
    file.write_text(f'store = "{url}"\nartifacts = "file://{folder}/artifacts"\n')
    (folder / "artifacts").mkdir()
    config = msgspec.structs.replace(load_config(file), cache_dir=farm_cache)
    tools = prepare(config)
    client = msgspec.structs.replace(config, cache_dir=folder / "client-cache")
    with open_store(url) as store, open_store(hosts_url) as hosts:
        yield BuildFarm(store, hosts, hosts_url, open_objects(client), file, folder / "caches", farm_cache, tools)
