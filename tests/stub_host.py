"""A stand-in for an agent: it claims and records through the store alone, and has no device to run anything on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import made
from msgspec.structs import replace
from shared_rows import facts

from farm.builds.compile.protocol import BuildReply
from farm.devices.device import Device
from farm.dispatch.cluster.delivery import finish
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.cluster.records import (
    AgentDevice,
    AgentId,
    Build,
    HeldShard,
    OfferedToolchain,
    PlannedJob,
    ShardResult,
)
from farm.store.objects.objects import Objects
from farm.store.store import Store, open_store

TTL_S = 5.0
Answer = tuple[Verdict, Stage, str]
PASSED: Answer = (Verdict.PASSED, Stage.DONE, "")


def virtual_device(serial: str, host: str) -> AgentDevice:
    """Return a virtual device as an agent reports it."""
    return AgentDevice(f"{serial}@{host}", serial, "SM8650", kind="virtual", os="android", name="")


def device_of(device: AgentDevice, host: str) -> Device:
    """Return the device of an agent's description."""
    return made.device(device.serial, device.soc, kind="virtual", host=host)


class StubHost(threading.Thread):
    """Agent that claims shards of `store.cluster` and reports the result of `answer` for each job after `seconds`."""

    def __init__(
        self,
        url: str,
        name: str,
        devices: Sequence[AgentDevice],
        *,
        objects: Objects | None = None,
        offered: Sequence[OfferedToolchain] = (),
        answer: Callable[[str, str], Answer] = lambda *_: PASSED,
        seconds: float = 0.0,
        jobs: int | None = None,
    ) -> None:
        """Start a host; with `jobs` it stops after this number until `let` allows more."""
        super().__init__(name=name, daemon=True)
        self._url, self._devices, self._objects, self._offered = url, list(devices), objects, tuple(offered)
        self._answer, self._seconds = answer, seconds
        self._may = threading.Semaphore(jobs if jobs is not None else 1_000_000)
        self._over = threading.Event()
        self._registered = threading.Event()
        self._worker: int | None = None
        self.ran: list[tuple[str, str]] = []
        """Job and device."""

    def __enter__(self) -> StubHost:
        self.start()
        assert self._registered.wait(15)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join(30)

    def let(self) -> None:
        """Let it do all jobs."""
        self._may.release(1_000_000)

    def run(self) -> None:
        with open_store(self._url) as store:
            ids = tuple(one.id for one in self._offered)
            mine = replace(facts(self.name, 0), devices=tuple(self._devices), toolchains=ids, offered=self._offered)
            agent = store.cluster.register(self.name, mine, TTL_S, user="farm")
            self._registered.set()
            beat_s = 0.0
            while not self._over.is_set():
                if time.monotonic() - beat_s > 1.0:
                    beat_s = time.monotonic()
                    store.cluster.heartbeat(agent, None, TTL_S)
                if not self._turn(store, agent):
                    self._over.wait(0.05)
            store.cluster.leave(agent)

    def _turn(self, store: Store, agent: AgentId) -> bool:
        worked = self._build(store, agent)
        for soc in sorted({device.soc for device in self._devices}):
            ids = [device.id for device in self._devices if device.soc == soc]
            for held in store.cluster.claim(agent, soc, ids, ttl_s=TTL_S):
                worked = True
                self._run_shard(store, agent, held)
                finish(store, held.run_id)
        store.cluster.recover(ttl_s=10)
        for order in store.cluster.queue().orders:
            finish(store, order.run_id)
        return worked

    def _build(self, store: Store, agent: AgentId) -> bool:
        ids = [one.id for one in self._offered]
        if not ids:
            return False
        if self._worker is None:
            self._worker = store.cluster.begin_worker()
        store.cluster.keep_workers([self._worker], [])
        held = store.cluster.take_build(self._worker, agent.name, ids)
        if held is None:
            return False
        assert self._objects is not None
        key = held.task.key
        archive = made.put_bytes(self._objects, key.encode())
        done = Build(key, "built", archive, len(key), BuildReply(key, ok=True, seconds=0.5))
        manifest = made.manifest(key=key, job_id=held.task.job.id, pte_bytes=100, seconds={"total": 0.5})
        store.cluster.record_build(held, done, manifest)
        return True

    def _run_shard(self, store: Store, agent: AgentId, held: HeldShard) -> None:
        device = next(one for one in self._devices if one.id == held.lease.device)
        store.record_device(held.run_id, device_of(device, self.name))
        for one in held.jobs:
            if not self._may_go_on(store, agent, held):
                break
            refused = store.cluster.record(agent, [self._result(held, one, device)], ttl_s=TTL_S)
            assert not refused or "cancelled" in str(refused), refused
            self.ran.append((one.job.id, device.id))
        store.cluster.release(agent, [held.lease])

    def _may_go_on(self, store: Store, agent: AgentId, held: HeldShard) -> bool:
        """Take the time of a job, as an agent whose slot is busy: it receives requests meanwhile."""
        end_s = time.monotonic() + self._seconds
        while True:
            reply = store.cluster.heartbeat(agent, None, TTL_S)
            ended = {*reply.cancelled, *reply.stopped}
            if held.run_id in ended or held.lease.device in reply.wanted or self._over.is_set():
                store.cluster.put_back(agent, held.id, held.lease.fence, why="handed over")
                return False
            if time.monotonic() >= end_s and self._may.acquire(timeout=0.1):
                return True
            self._over.wait(0.02)

    def _result(self, held: HeldShard, one: PlannedJob, device: AgentDevice) -> ShardResult:
        verdict, stage, reason = self._answer(one.job.id, device.id)
        started_ms = time.time_ns() // 1_000_000
        attempt = Attempt(
            one.job.id, verdict, stage, reason, device=device.serial, seconds=0.2, started_ms=started_ms
        )  # fmt: skip
        return ShardResult(held.id, device.id, held.lease.fence, one.job.id, (attempt,))


def write_config(folder: Path, url: str, artifacts: Path) -> Path:
    """Write the farm.toml of a shared farm."""
    file = folder / "farm.toml"
    file.write_text(f'store = "{url}"\nartifacts = "file://{artifacts}"\n')
    file.chmod(0o600)
    return file
