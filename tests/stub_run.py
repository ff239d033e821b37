"""Runs the jobs of a stub farm as `farm run` does, with leases, workers and store, for soaks and benchmarks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from log_lines import LogLines
from stub_farm import EXPECTED, StubFarm

from farm.base.config.settings import HealthConfig, LeaseConfig, load_config
from farm.base.machine import user_name
from farm.base.processes import Supervisor
from farm.dispatch.device_forks import device_forks
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunPlan
from farm.dispatch.run.run import LocalRun
from farm.policy.situation import Lease, Priority
from farm.results.attempt import Verdict
from farm.store.records import RunRecord, RunView
from farm.store.store import open_store


@dataclass
class Quiet:
    """Front end that keeps its messages."""

    notes: LogLines = field(default_factory=LogLines)
    ended: list[dict[str, Any]] = field(default_factory=list)
    repeated: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, **_: object) -> None: ...

    def build_started(self, job_id: str) -> None: ...

    def build_ended(self, job_id: str, reply: object) -> None: ...

    def devices(self, running: dict[str, str]) -> None: ...

    def job_ended(self, shown: dict[str, Any]) -> None:
        self.ended.append(shown)

    def job_repeated(self, shown: dict[str, Any]) -> None:
        self.repeated.append(shown)


@dataclass(frozen=True)
class StubRun:
    """How it ended."""

    view: RunView
    leases: list[Lease]
    """Remaining leases."""
    front: Quiet


def run_stub_farm(farm: StubFarm, folder: Path, *, timeout_s: float) -> StubRun:
    """Run every job of `farm` with its store and its state in `folder`."""
    os.environ["FARM_STATE_DIR"], os.environ["FARM_CACHE_DIR"] = str(folder / "state"), str(folder / "cache")
    config = load_config(folder=folder)
    front = Quiet()
    # Devices that others could use as well: each needs a lease.
    devices = tuple(msgspec.structs.replace(device, host=socket.gethostname()) for device in farm.devices)
    with open_store(config.store_url) as store, Supervisor() as supervisor:
        run_id = store.begin_run(RunRecord("bench", user_name(), socket.gethostname(), {"runner": "stub"}))
        store.plan_jobs(run_id, [planned.job for planned in farm.jobs])
        plan = RunPlan(
            run_id=run_id, folder=config.run_folder(run_id), cache_root=farm.cache_root, jobs=farm.jobs,
            devices=devices, runtimes=farm.runtimes, iterations=1, warm_up=0, timeout_s=timeout_s,
            artifact_root=config.state_dir / "artifacts", profile=Profile.OFF, health_checks=farm.health_checks,
            leased=True, health=HealthConfig(gate_wait_s=2.0),
        )  # fmt: skip
        plan.prepare_folder()
        for device in devices:
            store.record_device(run_id, device)
        terms = LeaseTerms(times=LeaseConfig(), priority=Priority.PERSON, purpose="bench", most=None)
        pool = DevicePool(devices, store, terms)
        try:
            pool.acquire()
            LocalRun(plan, pool, store, front, forks=device_forks(supervisor)).run()
        finally:
            pool.close()
            front.notes.close()
        store.finish_run(run_id, 0)
        return StubRun(store.runs.view(run_id), store.leases.all(), front)


def judge(view: RunView, behaviours: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the jobs with an unexpected end, by kind of error; `behaviours` has names of EXPECTED by job id."""
    wrong: dict[str, list[str]] = {"wrong_verdict": [], "lost": [], "duplicated": []}
    for job in view.jobs:
        expected, _ = EXPECTED[behaviours[job.id]]
        if not job.attempts:
            wrong["lost"].append(job.id)
            continue
        # Infra is no verdict about the code: another attempt may follow, and none after any other.
        final = [attempt for attempt in job.attempts if attempt.verdict is not Verdict.INFRA]
        if len(final) > 1 or (final and job.attempts[-1] is not final[0]):
            wrong["duplicated"].append(job.id)
        if final and final[-1].verdict is not expected:
            wrong["wrong_verdict"].append(f"{job.id}: {final[-1].verdict} for {final[-1].reason}")
    return wrong


def spans(view: RunView) -> Iterator[tuple[str, float, float]]:
    """Yield device, start and end of every attempt, in seconds."""
    for job in view.jobs:
        for attempt in job.attempts:
            begin = attempt.started_ms / 1000
            yield attempt.device, begin, begin + attempt.seconds
