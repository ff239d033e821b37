"""Farms of several hosts for tests: a real PostgreSQL, agents as processes, stub devices, and their invariants."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from chaos_store import Cluster, postgres_cluster
from forked_command import start
from store_template import drop_database
from stub_evidence import Ran, overlaps
from stub_hosts import StubHosts, accepted, stub_hosts
from waiting import free_port

from farm.store.store import Store, open_store

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
    with postgres_cluster(*settings, hba=_HBA) as cluster:
        if isinstance(cluster, str):
            pytest.skip(cluster)
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
