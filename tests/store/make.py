"""Jobs, attempts and runs for tests of the store, with defaults: a test names the facts that matter to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import made
import msgspec

from farm.devices.device import Device
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.records import RunRecord, RunToolchain
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import InputSpec, Job

HOUR_MS = 3_600_000


def job(case: str = "relu", precision: str = "8a8w", soc: str = "SM8650", **changes: object) -> Job:
    fields = {"suite": "quantized_ops", "inputs": (InputSpec((1, 3)),), **changes}
    return made.job(case, soc, precision=precision, **fields)


def device(serial: str = "virtual-1", kind: str = "virtual", build: str = "farm/virtual/1") -> Device:
    return made.device(serial, kind=kind, build=build)


def attempt(job: Job, **changes: object) -> Attempt:
    facts: dict[str, object] = {
        "job_id": job.id,
        "verdict": Verdict.PASSED,
        "stage": Stage.DONE,
        "reason": "",
        "device": "virtual-1",
        "started_ms": 1_790_000_000_123,
        "seconds": 0.25,
        "bundle_key": "b" * 64,
        "measurements": (latency(1.0, 2.0, 3.0),),
        **changes,
    }
    return Attempt(**facts)  # type: ignore[arg-type]


def latency(*samples: float) -> Measurement:
    return Measurement("latency", "ns", Direction.LOWER, samples)


def counter(value: float) -> Measurement:
    return Measurement("pte_size", "bytes", Direction.LOWER, (float(value),), exact=True)


def comparison(**changes: object) -> Comparison:
    facts: dict[str, object] = {
        "output": 0,
        "reference": "fp32",
        "sqnr_db": 40.0,
        "cosine": 0.999,
        "max_abs": 0.01,
        "mismatch": None,
        **changes,
    }
    return Comparison(**facts)  # type: ignore[arg-type]


def begin(store: Store, *jobs: Job, started_ms: int | None = None, kind: str = "virtual") -> str:
    """Begin a run of `jobs` on one device and return its id."""
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {"executorch": "1.5.1"}, started_ms))
    store.plan_jobs(run_id, jobs)
    store.record_device(run_id, device("virtual-1" if kind == "virtual" else "phone-1", kind))
    return run_id


def run(
    store: Store,
    hours_ago: float,
    *results: tuple[Job, Verdict | str] | tuple[Job, Verdict | str, Mapping[str, Any]],
    user: str = "ada",
    kind: str = "virtual",
    build: str = "farm/virtual/1",
    runtime: dict[str, str] | None = None,
    priority: str = "person",
    toolchain: RunToolchain | None = None,
    nightly_run: str = "",
    finished: bool = True,
    **facts: str,
) -> str:
    """Record a run: each result is an attempt of a job with its verdict, "" for none, and other fields."""
    started_ms = now_ms() - round(hours_ago * HOUR_MS)
    known = {"device_kind": kind, **facts}
    record = RunRecord("farm run", user, "bench", known, started_ms, priority, toolchain or RunToolchain())
    run_id = store.begin_run(msgspec.structs.replace(record, nightly_run=nightly_run))
    store.plan_jobs(run_id, list({job.id: job for job, *_ in results}.values()))
    store.record_device(run_id, device(kind=kind, build=build), runtime)
    for place, (job, verdict, *changes) in enumerate(results):
        if verdict:
            reason = "" if verdict == Verdict.PASSED else f"{verdict} in {run_id}"
            fields = {"reason": reason, "started_ms": started_ms + place, **(changes[0] if changes else {})}
            store.record_attempt(run_id, attempt(job, verdict=Verdict(verdict), **fields))
    if finished:
        store.finish_run(run_id, 0)
    return run_id
