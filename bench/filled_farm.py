"""Real PostgreSQL with the rows of a large farm at work, and the cost of the calls of agents and clients in it.

Agents register, runs are submitted and shards are claimed by the calls that a real farm makes, one after the other, by
one client; most rows are copies of the rows that these calls wrote (bench/farm_rows.py). The cost of a call is
processor time by the kernel's counters, of PostgreSQL's processes and of the caller, which other work on the machine
hardly changes. Statements are counted by pg_stat_statements.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos_store import Cluster, PostgresStore, postgres_cluster
from farm_rows import add_history, hold_devices, multiply_shards
from simulated_farm import JOB_MEDIAN_S, JOB_SPREAD, Night, Run, Size, case
from sqlalchemy import Connection, create_engine

from farm.devices.device import AdbAddress, Device
from farm.policy.divide import divide
from farm.policy.situation import Priority
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.cluster.records import (
    AgentDevice,
    AgentFacts,
    AgentId,
    Build,
    HeldShard,
    NewOrder,
    NewShard,
    ShardJob,
    ShardResult,
)
from farm.store.protocol import PROTOCOL
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Job, Target

SETTINGS = (
    "shared_preload_libraries=pg_stat_statements",
    "max_connections=200",
    "shared_buffers=512MB",
)
TTL_S = 3600.0
CALLS = 200
SUBMITTED = 8_000
"""Jobs of nightly runs that are submitted by calls; their rows are multiplied afterwards."""
# Runs of people at once, besides all nightly runs.
PERSON_RUNS = 40
KIND, OS = "hardware", "android"
ARCHIVE = "a" * 64
BUNDLES = 1_000
"""Number of bundles of each SoC."""

_STATEMENTS = """
    SELECT coalesce(sum(calls), 0) FROM pg_stat_statements
    WHERE query NOT IN ('BEGIN', 'COMMIT', 'ROLLBACK') AND query NOT LIKE '%pg_stat_%'
"""
_PROCESSES = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@dataclass
class Costs:
    """Costs of a call of each kind."""

    cost_ms: dict[str, float] = field(default_factory=dict)
    """Processor time of PostgreSQL."""
    caller_ms: dict[str, float] = field(default_factory=dict)
    """Processor time of the caller."""
    statements: dict[str, float] = field(default_factory=dict)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    connections: int = 1_000
    """Connections that fit into 4 GB of a server: a working one takes 3 to 8 MB of its own, a listening one 1 MB."""


def measure(size: Size) -> Costs:
    """Fill a database like a night of this size, and return the costs of calls in it."""
    with postgres_cluster(*SETTINGS) as cluster:
        if not isinstance(cluster, Cluster):
            raise SystemExit(cluster)
        url = PostgresStore(cluster, "farm").url
        with open_store(url) as store:
            filled = Filled(store, url, size)
            filled.fill()
            return filled.costs()


class Filled:
    """The rows of a farm at work."""

    def __init__(self, store: Store, url: str, size: Size) -> None:
        self._store, self._url, self._size = store, url, size
        self._night = Night(size)
        self._draw = random.Random(size.seed)
        self._agents: dict[str, AgentId] = {}
        self._held: list[tuple[str, HeldShard]] = []
        """With the host."""
        self._built: set[str] = set()
        self._measured = Costs()

    def fill(self) -> None:
        """Register all hosts, submit the nights and some runs of people, and let every device run something."""
        self._register()
        nights = sum(sum(jobs.values()) for run, jobs in self._night.submissions if run.priority == Priority.NIGHTLY)
        times = max(1, nights // SUBMITTED)
        for run, jobs in self._chosen():
            part = times if run.priority == Priority.NIGHTLY else 1
            self._submit(run, {soc: max(1, count // part) for soc, count in jobs.items()})
        idle = sorted(self._draw.sample(sorted(self._night.host_of), min(CALLS, len(self._night.host_of) // 4)))
        with self._connection() as connection:
            multiply_shards(connection, times - 1)
            hold_devices(connection, idle)
        for device in idle:
            host = self._night.host_of[device]
            self._claim(host, self._agents[host], device.split("-", maxsplit=1)[0], [device])
        host, held = self._held[0]
        self._store.record_device(held.run_id, _device(held.lease.device))
        self._record(host, held, held.jobs[:1])
        with self._connection() as connection:
            add_history(connection, self._size.jobs)
        self._sql("ANALYZE")

    def costs(self) -> Costs:
        """Return what calls cost, each made many times."""
        cluster, draw = self._store.cluster, self._draw
        # The first calls pay once for the connection, its prepared statements and pages that are read.
        for host in list(self._agents)[:20]:
            cluster.heartbeat(self._agents[host], None, TTL_S)
        hosts = draw.choices(list(self._agents), k=CALLS)
        self._cost(
            "heartbeat", [lambda host=host: cluster.heartbeat(self._agents[host], None, TTL_S) for host in hosts]
        )
        for _, held in self._held:
            self._store.record_device(held.run_id, _device(held.lease.device))
        # The first shard is left out, as `fill` has recorded its first job.
        chosen = self._held[1:]
        self._cost(
            "record",
            [lambda host=host, held=held: self._record(host, held, held.jobs[:1]) for host, held in chosen],
        )
        for host, held in chosen:
            self._record(host, held, held.jobs[1:])
        self._cost("claim", [lambda host=host, held=held: self._go_on(host, held) for host, held in chosen])
        self._cost("queue", [cluster.queue] * 5)
        runs = sorted({held.run_id for _, held in self._held})
        self._cost("progress", [lambda run=run: cluster.progress(run, 2**40) for run in draw.choices(runs, k=20)])
        self._cost("recover", [partial(cluster.recover, ttl_s=10.0)] * 5)
        person = Run("late", "user9", Priority.PERSON, 0.0)
        largest = max(self._night.farms.values(), key=lambda farm: len(farm.living))
        self._cost("submit 400 jobs", [lambda: self._submit(person, {largest.soc: 400})] * 3)
        return self._measured

    def _register(self) -> None:
        hosts: dict[str, list[AgentDevice]] = {}
        for farm in self._night.farms.values():
            for name, device in farm.living.items():
                host = self._night.host_of[name]
                hosts.setdefault(host, []).append(AgentDevice(name, name, farm.soc, KIND, OS, device.labels))
        for host, devices in sorted(hosts.items()):
            facts = AgentFacts(host=host, pid=1, version="bench", protocol=PROTOCOL, devices=tuple(devices))
            self._agents[host] = self._store.cluster.register(host, facts, TTL_S, user="farm")

    def _chosen(self) -> Iterator[tuple[Run, dict[str, int]]]:
        people = 0
        for run, jobs in self._night.submissions:
            people += run.priority == Priority.PERSON
            if run.priority == Priority.NIGHTLY or people <= PERSON_RUNS:
                yield run, jobs

    def _submit(self, run: Run, jobs: dict[str, int]) -> None:
        run_id = self._store.begin_run(RunRecord("farm run", run.user, "bench", {"runner": "stub"}))
        planned = [(Job(case(n), Target(soc, "htp", "8a8w")), _key(n, soc)) for soc in jobs for n in range(jobs[soc])]
        work = [ShardJob(job, key, self._draw.lognormvariate(0.0, JOB_SPREAD) * JOB_MEDIAN_S) for job, key in planned]
        devices = {soc: len(self._night.farms[soc].living) for soc in jobs}
        parts = divide(work, devices=devices, cached={one.key for one in work}, sessions={})
        shards = [NewShard(*part) for part in parts]
        order = NewOrder(
            run_id=run_id,
            user=run.user,
            priority=run.priority,
            purpose="farm run",
            terms=b"{}",
            protocol=PROTOCOL,
            labels=run.labels,
        )
        built = [Build(key, "built", ARCHIVE, 1) for key in sorted({one.key for one in work} - self._built)]
        self._built.update(build.key for build in built)
        self._store.cluster.submit(order, shards, (), built, jobs=[job for job, _ in planned])

    def _claim(self, host: str, agent: AgentId, soc: str, names: Sequence[str]) -> None:
        for held in self._store.cluster.claim(agent, soc, names, ttl_s=TTL_S):
            self._held.append((host, held))

    def _record(self, host: str, held: HeldShard, jobs: Sequence[ShardJob]) -> None:
        results = [
            ShardResult(held.id, held.lease.device, held.lease.fence, one.job.id, (_attempt(one, held.lease.device),))
            for one in jobs
        ]
        if results:
            refused = self._store.cluster.record(self._agents[host], results, ttl_s=TTL_S)
            assert not refused, refused

    def _go_on(self, host: str, held: HeldShard) -> None:
        soc = held.jobs[0].job.target.soc
        keep = {held.lease.device: held.lease}
        self._store.cluster.claim(self._agents[host], soc, (), ttl_s=TTL_S, keep=keep)

    def _cost(self, name: str, calls: Sequence[object]) -> None:
        before, before_ms, began_s = self._statements(), self._used_ms(), time.process_time()
        for call in calls:
            call()  # type: ignore[operator]
        caller_s, used_ms = time.process_time() - began_s, self._used_ms()
        self._measured.cost_ms[name] = round((used_ms - before_ms) / len(calls), 2)
        self._measured.caller_ms[name] = round(caller_s / len(calls) * 1000, 2)
        self._measured.statements[name] = round((self._statements() - before) / len(calls), 1)
        now = {kind: getattr(self._measured, kind)[name] for kind in ("cost_ms", "caller_ms", "statements")}
        print(json.dumps({name: now}), flush=True)

    def _statements(self) -> int:
        self._sql("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        return int(str(self._sql(_STATEMENTS)))

    def _used_ms(self) -> float:
        """Return the processor time of all connections of this process so far."""
        import psycopg

        with psycopg.connect(**self._store.connection_arguments(), autocommit=True) as connection:
            processes = [row[0] for row in connection.execute(_PROCESSES).fetchall()]
        # The first number: nanoseconds on a processor.
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in processes) / 1e6

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        engine = create_engine(self._url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            yield connection
        engine.dispose()

    def _sql(self, statement: str) -> object:
        import psycopg

        with psycopg.connect(**self._store.connection_arguments(), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None


def _key(number: int, soc: str) -> str:
    # Runs share bundles. How many there are in all is no matter: they are looked up by their keys.
    return f"{number % BUNDLES}-{soc}".ljust(64, "0")


def _device(name: str) -> Device:
    return Device(
        serial=name,
        soc=name.split("-", maxsplit=1)[0],
        kind=KIND,
        build="bench",
        address=AdbAddress(5037),
        product="phone",
    )


def _attempt(one: ShardJob, device: str) -> Attempt:
    return Attempt(
        job_id=one.job.id,
        verdict=Verdict.PASSED,
        stage=Stage.DONE,
        reason="",
        device=device,
        started_ms=1_790_000_000_123,
        seconds=one.expected_s,
        bundle_key=one.key,
        measurements=tuple(Measurement(f"metric{n}", "ns", Direction.LOWER, (1.0, 2.0, 3.0)) for n in range(8)),
    )
