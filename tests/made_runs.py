"""Runs that no device ran: jobs of one suite on one phone, recorded by farm's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import made

from farm.base.machine import user_name
from farm.devices.device import Device
from farm.policy.situation import Priority
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.leases.leasing import Leases
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.store import Store
from farm.suites.suite import Job

HOUR_MS = 3_600_000
BEGAN_MS = 1_790_000_000_000
FACTS = {"executorch": "1.5.1", "qnn": "2.51"}
PHONE = made.device()


def made_job(case: str = "c", suite: str = "s") -> Job:
    """Return a job of a ReLU, `s/c[SM8650-htp-8a8w]` unless it is named."""
    return made.job(case, suite=suite)


JOB = made_job()


def measured(metric: str, value: float, unit: str = "ns", *, exact: bool = False) -> Measurement:
    """Return a measurement of which less is better."""
    return Measurement(metric, unit, Direction.LOWER, (value,), exact=exact)


def attempt_of(job: Job, verdict: Verdict = Verdict.PASSED, **fields: Any) -> Attempt:
    """Return an attempt on the phone; a failed one is off in its numbers."""
    failed = verdict is not Verdict.PASSED
    usual = {"reason": "output 0 is off" if failed else "", "device": PHONE.serial, "started_ms": BEGAN_MS}
    stage = Stage.NUMERICS if failed else Stage.DONE
    return Attempt(job.id, verdict, **{"stage": stage, **usual, **fields})


def record_run(
    store: Store,
    jobs: Sequence[Job] = (JOB,),
    verdicts: Sequence[Verdict] | None = None,
    *,
    started_ms: int = BEGAN_MS,
    attempt: Mapping[str, Any] | None = None,
    device: Device = PHONE,
    runtime: Mapping[str, str] | None = None,
    artifacts: Sequence[ArtifactRecord] = (),
    exit_code: int | None = 0,
    **record: Any,
) -> str:
    """Record a run and return its id: one attempt for each verdict, by default all passed.

    `attempt` has further fields of the attempts, `record` of the run, and `runtime` the hashes of the device's files.
    A run without an exit code has not finished.
    """
    usual = {"command": "farm run", "user": user_name(), "host": "bench", "fingerprint": FACTS}
    run_id = store.begin_run(RunRecord(**{**usual, **record}, started_ms=started_ms))  # type: ignore[arg-type]
    store.plan_jobs(run_id, jobs)
    reached = (Verdict.PASSED,) * len(jobs) if verdicts is None else verdicts
    if reached:
        store.record_device(run_id, device, runtime)
    for job, verdict in zip(jobs, reached, strict=False):
        fields = {"started_ms": started_ms, "device": device.serial, **(attempt or {})}
        store.record_attempt(run_id, attempt_of(job, verdict, **fields), artifacts=artifacts)
    if exit_code is not None:
        store.finish_run(run_id, exit_code)
    return run_id


def ask(leases: Leases, *devices: str, **changes: Any) -> str:
    """Let a person's run in another process wait for one of the devices; return the token of the request."""
    usual = {"count": 1, "user": "ada", "host": "bench", "pid": 7, "purpose": "farm run", "priority": Priority.PERSON}
    return leases.request(devices, **{**usual, "ttl_s": 10.0, **changes})


def take(store: Store, device: str, user: str = "ci", **changes: Any) -> None:
    """Lease a device to a nightly run of another process."""
    token = ask(store.leases, device, user=user, ttl_s=300, priority=Priority.NIGHTLY, **changes)
    assert store.leases.poll(token, ttl_s=300)
