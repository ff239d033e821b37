"""Shared farms of stub hosts on this machine, for tests and bench/cluster.py, and their invariants."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from chaos_store import Cluster, PostgresStore
from farm_home import FarmHome
from forked_command import Program, start, start_anew
from postgresql_server import server_binaries
from shared_rows import made_terms, submit
from stores import drop_database
from stub_farm import FINE, SOC, Ran, executions, make_bundle, overlaps, stub_case, stub_runtime
from waiting import free_port, until

from farm.base.config.settings import load_config
from farm.base.errors import ExitCode
from farm.builds.bundles.cache import BundleCache
from farm.dispatch.cluster.files import upload_runtime
from farm.dispatch.cluster.terms import RemoteRuntime
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.dispatch.request.profiling import Profile
from farm.policy.situation import Priority
from farm.results.attempt import Verdict
from farm.store.cluster.records import Build, NewShard, PlannedJob
from farm.store.objects.archive import upload_bundle
from farm.store.objects.objects import Objects, open_objects
from farm.store.store import Store, open_store
from farm.suites.suite import Job, Target

# Shared farm of stub hosts on this machine, for tests and bench/cluster.py: real PostgreSQL and agents, stub slots.
#
# Each host is a process (stub_agent.py) with folders of its own. Its devices only sleep; files record their jobs
# (stub_evidence.py). Rows, leases, messages, bundles and their way to a host are the real thing.


AGENT = Path(__file__).with_name("stub_agent.py")
_FINAL = {
    ExitCode.PASSED, ExitCode.USAGE, ExitCode.MISSING_TOOL, ExitCode.REFUSED, ExitCode.NO_STORE, ExitCode.AGENT_REFUSED,
}  # fmt: skip
"""Exit codes after which systemd does not start an agent again."""


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a stub agent, passed as a file."""

    name: str
    folder: Path
    """Folder of this host alone: cache, state, farm.toml."""
    evidence: Path
    socs: tuple[str, ...]
    """SoCs, an entry for each device."""
    ttl_s: float
    rest_s: float = 60.0
    fetch_s: float = 15.0


@dataclass
class StubHosts:
    """A database, an artifacts' store and hosts."""

    folder: Path
    url: str
    """URL of the store for this process."""
    artifacts: str
    ttl_s: float = 10.0
    rest_s: float = 60.0
    fetch_s: float = 15.0
    """Intervals and limits of agents, named as in `LeaseConfig` and `Timing`."""
    urls: dict[str, str] = field(default_factory=dict)
    """URLs of the store by host, where they differ from `url`."""
    artifacts_at: dict[str, str] = field(default_factory=dict)
    """Places of the artifacts' store by host, where they differ from `artifacts`."""
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    """Further variables by host; the empty name stands for all hosts."""
    restarts: bool = False
    """True to restart agents that end, as systemd does, except after the exit code against a restart."""
    starting: Callable[..., Program] = start_anew
    """Function that starts an agent."""
    processes: dict[str, Program] = field(default_factory=dict)
    remote_runtime: RemoteRuntime | None = None
    health_checks: tuple[PlannedJob, ...] = ()
    key: str = ""
    built: tuple[tuple[Build, None], ...] = ()

    @property
    def evidence(self) -> Path:
        """Return the folder with the record of executions."""
        return self.folder / "evidence"

    def prepare(self) -> None:
        """Upload the common runtime and bundle of all jobs, and make the store. Raises FarmError."""
        with open_store(self.url):
            pass
        runtime = stub_runtime(self.folder / "runtime")
        self.remote_runtime = upload_runtime(self.objects(), runtime, soc=SOC, device_kind="virtual", os="android")
        self.use_bundle(f"{FINE} 1")
        [health_check] = health_check_jobs((stub_job(0),))
        self.health_checks = (PlannedJob(health_check, self.key),)

    def use_bundle(self, words: str) -> None:
        """Let the jobs of runs to come have a bundle with these words, which no host has fetched yet."""
        cache = BundleCache(self.folder / "cache")
        self.key = make_bundle(cache, words)
        bundle = cache.lookup(self.key)
        assert bundle is not None
        self.built = (*self.built, (Build(self.key, "built", *upload_bundle(self.objects(), bundle)), None))

    def objects(self) -> Objects:
        """Return this process's way to the artifacts' store."""
        return open_objects(self.config("client"))

    def config(self, name: str) -> Any:
        """Return the configuration of a host, or of a person, of this name."""
        folder = self.home(name)
        with patch.dict(os.environ, self.env_of(name), clear=True):
            return load_config(folder=folder)

    def home(self, name: str) -> Path:
        """Return the folder of a host, with its farm.toml."""
        folder = self.folder / "hosts" / name
        folder.mkdir(parents=True, exist_ok=True)
        text = (
            f'store = "{self.urls.get(name, self.url)}"\nartifacts = "{self.artifacts_at.get(name, self.artifacts)}"\n'
        )
        file = folder / "farm.toml"
        # A host may be reading it.
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        return folder

    def env_of(self, name: str) -> dict[str, str]:
        """Return the variables that a process of a host has."""
        folder = self.home(name)
        own = FarmHome(folder / "cache", folder / "state", folder).env
        return {**own, **self.env.get("", {}), **self.env.get(name, {})}

    def start(self, name: str, devices: int | Sequence[str], *, agent_name: str = "") -> None:
        """Start the agent of a host with so many devices of SOC, or with devices of the named SoCs."""
        socs = (SOC,) * devices if isinstance(devices, int) else tuple(devices)
        folder = self.home(name)
        plan = HostPlan(
            name=agent_name or name, folder=folder, evidence=self.evidence, socs=socs, ttl_s=self.ttl_s,
            rest_s=self.rest_s, fetch_s=self.fetch_s,
        )  # fmt: skip
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan, enc_hook=str))
        self._start(name)

    def _start(self, name: str) -> None:
        folder = self.home(name)
        words = [sys.executable, str(AGENT), str(folder / "plan.json")]
        self.processes[name] = self.starting(words, env=self.env_of(name), cwd=folder, log=folder / "agent.log")

    def kill(self, name: str) -> None:
        """Kill the agent of a host as `kill -9` does, without any message."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def die(self, name: str) -> None:
        """Kill everything of a host at once, as a power cut does."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> int:
        """Stop the agent of a host as systemd does, and return its exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(60)

    def log(self, name: str) -> str:
        """Return the output of a host's agent."""
        return (self.home(name) / "agent.log").read_text(errors="replace")

    def ran(self, run_id: str = "") -> list[Ran]:
        """Return the executions of one run or of all runs."""
        return [ran for ran in executions(self.evidence) if run_id in ("", ran.run)]

    def await_devices(self, store: Store, count: int) -> None:
        """Wait until living agents have `count` devices."""

        def there() -> bool:
            agents = [agent for agent in store.cluster.agents() if agent.alive]
            return sum(len(agent.facts.devices) for agent in agents) == count

        self.until(there, f"{count} devices")

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Wait until `condition` holds. Raises AssertionError with the output of the agents after `timeout_s`."""

        def logs() -> str:
            return "".join(f"\n--- {name}\n{self.log(name)[-3000:]}" for name in self.processes)

        def is_so() -> bool:
            if condition():
                return True
            for name, process in list(self.processes.items()):
                if (code := process.poll()) is not None:
                    may_start = self.restarts and code not in _FINAL
                    assert may_start, f"never: {what}; {name} ended with {code}{logs()}"
                    self._start(name)
            return False

        until(is_so, lambda: f"{what}{logs()}", timeout_s)

    def submit(
        self,
        store: Store,
        user: str,
        jobs: int,
        *,
        latency_ms: int = 200,
        priority: Priority = Priority.PERSON,
        shard: int = 25,
    ) -> str:
        """Submit a run of `jobs` jobs in shards of so many, and return its id."""
        assert self.remote_runtime is not None
        seconds = latency_ms / 1000
        planned = [PlannedJob(stub_job(number, latency_ms), self.key, seconds) for number in range(jobs)]
        parts = [tuple(planned[begin : begin + shard]) for begin in range(0, jobs, shard)]
        shards = [NewShard(SOC, part, len(part) * seconds, n, needs=(self.key,)) for n, part in enumerate(parts)]
        terms = made_terms([self.remote_runtime], self.health_checks, toolchain="", profile=Profile.OFF)
        return submit(store, shards, user, priority, built=self.built, terms=terms, purpose="bench")


def stub_job(number: int, latency_ms: int = 200) -> Job:
    """Return a job that keeps its device for `latency_ms`."""
    return Job(stub_case(f"{FINE}_{number:05}", f"{FINE} {latency_ms}"), Target(SOC, "htp", "8a8w"))


def accepted(store: Store, run_id: str) -> dict[str, list[str]]:
    """Return the accepted deciding verdicts of each job of a run; a correct job has exactly one."""
    return {
        job.id: [attempt.verdict for attempt in job.attempts if attempt.verdict is not Verdict.INFRA]
        for job in store.runs.view(run_id).jobs
    }


@contextlib.contextmanager
def stub_hosts(
    cluster: Cluster,
    folder: Path,
    *,
    database: str = "farm",
    ttl_s: float = 10.0,
    artifacts: str = "",
    env: Mapping[str, str] | None = None,
    starting: Callable[..., Program] = start_anew,
) -> Iterator[StubHosts]:
    """Yield a farm without hosts in a new database of `cluster`; afterwards end all its processes and wait for them.

    Files are in a folder, or at `artifacts`; `env` has variables for all hosts.
    """
    (folder / "artifacts").mkdir(parents=True)
    where = artifacts or f"file://{folder}/artifacts"
    url = PostgresStore(cluster, database).url
    hosts = StubHosts(folder, url, where, ttl_s, env={"": dict(env or {})}, starting=starting)
    try:
        hosts.prepare()
        yield hosts
    finally:
        for process in hosts.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for name in list(hosts.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                hosts.processes[name].wait(10)
            hosts.die(name)


# Farms of several hosts for tests: a real PostgreSQL, agents as processes, stub devices, and their invariants.


TTL_S = 3.0
"""Seconds that a heartbeat of an agent is valid; 10 s outside of tests."""
QUICK_TO_NOTICE = "connect_timeout=2&keepalives_idle=2&keepalives_interval=1&keepalives_count=3&tcp_user_timeout=5000"
"""Parameters of an address whose server is noticed to be cut off within 5 s, 15 s outside of tests."""
_HBA = "local all all trust\nhost all all 127.0.0.1/32 trust\nhost all all 10.0.0.0/8 trust\n"
_numbers = itertools.count()


@dataclass
class Farm:
    """Hosts, their store, and the database server, which listens on a port as well."""

    hosts: StubHosts
    store: Store
    server: Cluster
    port: int
    runs: list[str] = field(default_factory=list)

    def begin(self, hosts: int = 3, devices: int = 2) -> None:
        """Start hosts and wait for their devices."""
        for number in range(hosts):
            self.hosts.start(f"host-{number}", devices)
        self.hosts.await_devices(self.store, hosts * devices)

    def submit(self, user: str, jobs: int, *, latency_ms: int = 100, shard: int = 5) -> str:
        """Submit jobs and return the run's id."""
        run_id = self.hosts.submit(self.store, user, jobs, latency_ms=latency_ms, shard=shard)
        self.runs.append(run_id)
        return run_id

    def await_ran(self, run_id: str, count: int) -> None:
        """Wait until `count` jobs of a run have begun."""
        self.until(lambda: len(self.hosts.ran(run_id)) >= count, f"{count} jobs that begin")

    def await_end(self, *runs: str, timeout_s: float = 60) -> None:
        """Wait until the runs have ended with an exit code, set by any host."""

        def are_over() -> bool:
            # All that is known of a run is much to read, and is read once.
            is_open = {order.run_id for order in self.store.cluster.queue().orders}
            return is_open.isdisjoint(runs or self.runs) and all(
                self.store.runs.view(run_id).exit_code is not None for run_id in runs or self.runs
            )

        self.until(are_over, "the end of the runs", timeout_s)

    def end_right(self) -> None:
        """Wait for the end of all runs, and assert their invariants."""
        self.await_end()
        self.require_right()

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Wait until something is so."""
        self.hosts.until(condition, what, timeout_s)

    def url_at(self, host: str, port: int) -> str:
        """Return the store's address by TCP."""
        database = self.hosts.url.partition("@/")[2].partition("?")[0]
        return f"postgresql://farm@{host}:{port}/{database}?sslmode=disable"

    def executed_again(self, run_id: str) -> list[str]:
        """Return jobs that devices ran more than once."""
        return [job for job, count in Counter(ran.job for ran in self.hosts.ran(run_id)).items() if count > 1]

    def ran_on(self, run_id: str, host: str) -> list[Ran]:
        """Return what devices of a host ran."""
        return [ran for ran in self.hosts.ran(run_id) if ran.device.endswith(f"@{host}")]

    def is_of_use(self, host: str) -> bool:
        """Submit runs until a host takes part in one; return False when it never does."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            run_id = self.submit("bob", 24, shard=1)
            self.await_end(run_id)
            if self.ran_on(run_id, host):
                return True
        return False

    def require_right(self) -> None:
        """Assert the invariants of all runs: one verdict a job, one job a device at a time."""
        for run_id in self.runs:
            verdicts = accepted(self.store, run_id)
            assert {job: found for job, found in verdicts.items() if len(found) != 1} == {}
            assert self.store.runs.view(run_id).exit_code == 0
        assert overlaps(self.hosts.ran()) == []
        # An ended run keeps no device.
        self.until(lambda: not self.store.leases.all(), "no leases that are left", 15)


@contextlib.contextmanager
def farm_server() -> Iterator[tuple[Cluster, int]]:
    """Yield a database server and its port; skips the tests where there is none."""
    port = free_port()
    light = ("full_page_writes=off", "autovacuum=off", "checkpoint_timeout=1h")
    settings = ("listen_addresses='*'", f"port={port}", "max_connections=200", *light)
    with contextlib.closing(Cluster(server_binaries(), *settings, hba=_HBA)) as cluster:
        yield cluster, port


@contextlib.contextmanager
def farm_of_hosts(
    cluster: Cluster, port: int, folder: Path, *, artifacts: str = "", env: Mapping[str, str] | None = None
) -> Iterator[Farm]:
    """Yield a farm without hosts, in a database of its own."""
    name = f"farm_{next(_numbers)}"
    with (
        stub_hosts(cluster, folder, database=name, ttl_s=TTL_S, artifacts=artifacts, env=env, starting=start) as hosts,
        open_store(hosts.url) as store,
    ):
        yield Farm(hosts, store, cluster, port)
    drop_database(hosts.url)


def sleep_ttl() -> None:
    """Sleep for longer than an agent's heartbeat is good for."""
    time.sleep(TTL_S + 1.0)
