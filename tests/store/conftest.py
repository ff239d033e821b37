"""Stores on each database: SQLite in a file, and PostgreSQL in a throw-away cluster where its server is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stores import drop_database, empty_store, place_store

from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.records import RunRecord, RunToolchain
from farm.store.rows import now_ms
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _new_stores_are_copies() -> None:
    """Leave new stores as they are made."""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a place without a store: no file yet, or an empty database."""
    if request.param == "sqlite":
        yield str(tmp_path / "farm.db")
        return
    new_database: Callable[[str], str] = request.getfixturevalue("new_database")
    address = new_database(f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of a store without a run."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("shared_address"))
    place_store(tmp_path / "farm.db")
    return str(tmp_path / "farm.db")


@pytest.fixture(scope="session")
def _one_store(new_store: Callable[[str], str]) -> str:
    return new_store("one_store")


@pytest.fixture
def shared_address(_one_store: str) -> str:
    """Address of a store on PostgreSQL, which agents share, without a run."""
    empty_store(_one_store)
    return _one_store


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    place_store(tmp_path / "farm.db")
    with open_store(tmp_path / "farm.db") as opened:
        yield opened


class Make:
    """Factory of jobs, attempts and other records for a store."""

    @staticmethod
    def job(case: str = "relu", precision: str = "8a8w", soc: str = "SM8650", **changes: object) -> Job:
        facts: dict[str, object] = {
            "suite": "quantized_ops",
            "name": case,
            "module": "torch.nn:ReLU",
            "inputs": (InputSpec(shape=(1, 3)),),
            **changes,
        }
        return Job(Case(**facts), Target(soc, "htp", precision))  # type: ignore[arg-type]

    @staticmethod
    def device(serial: str = "virtual-1", kind: str = "virtual", build: str = "farm/virtual/1") -> Device:
        return Device(serial=serial, soc="SM8650", kind=kind, build=build, address=AdbAddress(5037), product="phone")  # type: ignore[arg-type]

    @staticmethod
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
            "measurements": (Make.latency(1.0, 2.0, 3.0),),
            **changes,
        }
        return Attempt(**facts)  # type: ignore[arg-type]

    @staticmethod
    def latency(*samples: float) -> Measurement:
        return Measurement("latency", "ns", Direction.LOWER, samples)

    @staticmethod
    def counter(value: float, metric: str = "pte_size", unit: str = "bytes") -> Measurement:
        return Measurement(metric, unit, Direction.LOWER, (value,), exact=True)

    @staticmethod
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

    @staticmethod
    def begin(store: Store, *jobs: Job, started_ms: int | None = None, kind: str = "virtual") -> str:
        """Begin a run of `jobs` on one device and return its id."""
        run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {"executorch": "1.5.1"}, started_ms))
        store.plan_jobs(run_id, jobs)
        store.record_device(run_id, Make.device("virtual-1" if kind == "virtual" else "phone-1", kind))
        return run_id

    @staticmethod
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
        store.record_device(run_id, Make.device(kind=kind, build=build), runtime)
        for place, (job, verdict, *changes) in enumerate(results):
            if verdict:
                reason = "" if verdict == Verdict.PASSED else f"{verdict} in {run_id}"
                fields = {"reason": reason, "started_ms": started_ms + place, **(changes[0] if changes else {})}
                store.record_attempt(run_id, Make.attempt(job, verdict=Verdict(verdict), **fields))
        if finished:
            store.finish_run(run_id, 0)
        return run_id


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
