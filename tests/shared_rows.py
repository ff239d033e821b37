"""Rows and parts of a small shared farm for tests: agents, submitted runs, bundles, shards and terms."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import made
import msgspec
from made import write_bundle
from sqlalchemy import Row, select, text

from farm.base.config.settings import Config
from farm.base.forms import is_bundle_key
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.devices.device import Device
from farm.dispatch.cluster.terms import RemoteRuntime, WorkTerms
from farm.dispatch.request.profiling import Profile
from farm.policy.situation import Lease, Priority
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store import schema
from farm.store.cluster.records import (
    AgentDevice,
    AgentFacts,
    AgentId,
    Build,
    HeldBuild,
    HeldShard,
    NewBuild,
    NewOrder,
    NewShard,
    PlannedJob,
    ShardResult,
)
from farm.store.records import PROTOCOL, RunRecord
from farm.store.store import Store
from farm.suites.suite import Job

# A small shared farm for tests: agents with devices, and runs that are submitted to it.


SOC = "SM8650"
TTL_S = 10.0


def job(number: int = 0, soc: str = SOC) -> Job:
    """Return the job with this number."""
    return made.job(f"case_{number}", soc, suite="ops")


def key(number: int) -> str:
    """Return the key of the bundle of that job."""
    return f"{number:064x}"


def shards(count: int, jobs: int = 2, soc: str = SOC, first: int = 0) -> list[NewShard]:
    """Return `count` shards of `jobs` jobs each."""
    numbers = [range(first + n * jobs, first + (n + 1) * jobs) for n in range(count)]
    return [
        NewShard(soc, tuple(PlannedJob(job(n, soc), key(n), 1.0) for n in part), float(jobs), position)
        for position, part in enumerate(numbers)
    ]


def submit(
    store: Store,
    parts: Sequence[NewShard],
    user: str = "ada",
    priority: Priority = Priority.PERSON,
    builds: Sequence[NewBuild] = (),
    built: Sequence[tuple[Build, None]] = (),
    **changes: object,
) -> str:
    """Submit a run of shards, and return its id."""
    run_id = store.begin_run(RunRecord("farm run", user, "bench", {"executorch": "1.5.1"}))
    order = new_order(run_id, user=user, priority=priority, **changes)
    jobs = {one.job.id: one.job for part in parts for one in part.jobs}
    store.cluster.submit(order, parts, builds, built, jobs=list(jobs.values()))
    return run_id


def new_order(run_id: str, **changes: object) -> NewOrder:
    """Return the order of a run."""
    usual = {"user": "ada", "priority": Priority.PERSON, "purpose": "farm run", "terms": b"{}", "protocol": PROTOCOL}
    return NewOrder(run_id=run_id, **{**usual, **changes})  # type: ignore[arg-type]


def shards_of(store: Store, run_id: str) -> Sequence[Row[Any]]:
    """Return the rows of the shards of a run, in the order in which they go."""
    row = schema.shard.c
    with store._database.reading() as connection:
        query = select(row.id, row.state, row.why, row.lacking).where(row.run_id == run_id)
        return connection.execute(query.order_by(row.position, row.id)).all()


def execute(store: Store, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a statement of PostgreSQL in a transaction of its own."""
    import psycopg

    with psycopg.connect(**store.connection_arguments(), autocommit=True) as connection:
        done = connection.execute(statement, values or None)  # type: ignore[arg-type]
        return done.fetchall() if done.description else []


def defer_finish(store: Store, run_id: str) -> None:
    """Defer the job that finishes a run, also of a run that is not over, or not there."""
    deferred = text(
        "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW('farm', 'farm.finish', 50, NULL, 'finish:' || :run,"
        " jsonb_build_object('run', CAST(:run AS text)), NULL)\\:\\:procrastinate_job_to_defer_v1])"
    )
    store._database.write(lambda connection: connection.execute(deferred, {"run": run_id}))


def facts(host: str, devices: int = 1, soc: str = SOC, **changes: object) -> AgentFacts:
    """Return the facts of an agent with this number of devices."""
    there = tuple(
        AgentDevice(f"{host}-{n}", f"serial-{host}-{n}", soc, "virtual", "android", name=f"{host}.{n}")
        for n in range(devices)
    )
    output = AgentFacts(host=host, pid=1, version="1", protocol=PROTOCOL, devices=there)
    return msgspec.structs.replace(output, **changes)


def agent(store: Store, host: str = "h1", devices: int = 1, ttl_s: float = TTL_S, soc: str = SOC) -> AgentId:
    """Return an agent that lives, on a host with devices `h1-0`, `h1-1` ..."""
    return store.cluster.register(host, facts(host, devices, soc), ttl_s, user="farm")


def attempt(
    of: Job, verdict: Verdict = Verdict.PASSED, device: str = "", started_ms: int = 1_790_000_000_000
) -> Attempt:
    """Return how a job ended."""
    stage = Stage.DONE if verdict is Verdict.PASSED else Stage.EXECUTE
    reason = "" if verdict is Verdict.PASSED else "it did not work"
    return Attempt(of.id, verdict, stage, reason, device=device, started_ms=started_ms, seconds=0.2)


def result(held: HeldShard, one: PlannedJob, verdict: Verdict = Verdict.PASSED, **changes: object) -> ShardResult:
    """Return a device's result of a job in its shard."""
    done = attempt(one.job, verdict, f"serial-{held.lease.device}")
    output = ShardResult(held.id, held.lease.device, held.lease.fence, one.job.id, (done,))
    return msgspec.structs.replace(output, **changes)


def claim(store: Store, who: AgentId, *devices: str, **more: Any) -> list[HeldShard]:
    """Let an agent claim shards for its devices; for `h1-0` where none is named."""
    return store.cluster.claim(who, SOC, devices or ("h1-0",), **{"ttl_s": TTL_S, **more})


def holding(store: Store, count: int = 1, jobs: int = 2, **more: Any) -> tuple[str, AgentId, HeldShard]:
    """Return a run of `count` shards, an agent, and the shard that its device holds."""
    run_id, one = submit(store, shards(count, jobs), **more), agent(store)
    [held] = claim(store, one)
    return run_id, one, held


def record(store: Store, who: AgentId, held: HeldShard, *numbers: int, verdict: Verdict = Verdict.PASSED) -> list[int]:
    """Record the results of jobs of a shard, of all where none is named; return the places of refused ones."""
    jobs = [held.jobs[number] for number in numbers] or held.jobs
    return list(store.cluster.record(who, [result(held, one, verdict) for one in jobs], ttl_s=TTL_S))


def take_build(store: Store, worker: int, host: str = "b1", toolchain: str = "tool") -> HeldBuild:
    """Let a worker take the next build, which there is."""
    made = store.cluster.take_build(worker, host, [toolchain])
    assert made is not None
    return made


# Bundles, shards and terms as small as they can be, for tests of what travels between hosts.


NO_STORE = "postgresql://farm@127.0.0.1:1/farm"
"""Address at which no database answers."""


def made_job(name: str, soc: str = "SM8650") -> Job:
    return made.job(name, soc, suite="made")


def made_key(job: Job) -> str:
    key = hashlib.sha256(job.id.encode()).hexdigest()
    assert is_bundle_key(key)
    return key


def made_bundle(cache: BundleCache, job: Job, pte: bytes = b"a program") -> Bundle:
    def fill(folder: Path) -> None:
        contents = {"model.pte": pte, "inputs/input_0_0.raw": bytes(16)}
        write_bundle(folder, contents, key=made_key(job), job_id=job.id, soc=job.target.soc)
        (folder / "build.log").write_text("compiled\n")

    return cache.build(made_key(job), fill)


def made_config(root: Path, machine: str, artifacts: str = "", store: str = NO_STORE) -> Config:
    """Return the configuration of a machine of a shared farm, with a cache and a state of its own below `root`."""
    folder = root / machine
    folder.mkdir(exist_ok=True)
    found = made.config(folder, f'store = "{store}"\nartifacts = "{artifacts or f"file://{root}/place"}"\n')
    return msgspec.structs.replace(found, cache_dir=folder / "cache", state_dir=folder / "state")


def made_device(serial: str = "phone-1", soc: str = "SM8650") -> Device:
    return made.device(serial, soc, kind="virtual", host="attic")


def made_terms(
    runtimes: Iterable[RemoteRuntime],
    health_checks: Iterable[PlannedJob] = (),
    *,
    protocol: int = PROTOCOL,
    toolchain: str = "t",
    profile: Profile = Profile.AUTO,
) -> bytes:
    terms = WorkTerms(
        protocol=protocol, toolchain=toolchain, backend="htp", mode="traditional", iterations=1, warm_up=0,
        timeout_s=60.0, reducible=False, profile=profile, heap=False, runtimes=tuple(runtimes),
        health_checks=tuple(health_checks),
    )  # fmt: skip
    return msgspec.json.encode(terms)


def made_shard(jobs: Sequence[Job], terms: bytes, builds: Iterable[Build] = ()) -> HeldShard:
    lease = Lease("phone-1@attic", 7, "t", "ada", "attic", 1, "run", Priority.PERSON, 0, 10_000)
    planned = tuple(PlannedJob(job, made_key(job)) for job in jobs)
    by_key = {build.key: build for build in builds}
    return HeldShard(id=1, run_id="20261123-120000-abcdef", jobs=planned, lease=lease, terms=terms, builds=by_key)
