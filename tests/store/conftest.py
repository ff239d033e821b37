"""Stores on each database: SQLite in a file, and PostgreSQL in a throw-away cluster where its server is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_template import drop_database, place_store

from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target


@pytest.fixture(autouse=True)
def _new_stores_are_copies() -> None:
    """Leave new stores as they are made."""


@contextmanager
def _address(request: pytest.FixtureRequest, tmp_path: Path, maker: str) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "farm.db")
        return
    new: Callable[[str], str] = request.getfixturevalue(maker)
    address = new(f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a place without a store: no file yet, or an empty database."""
    with _address(request, tmp_path, "new_database") as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a store without a run."""
    with _address(request, tmp_path, "new_store") as address:
        if request.param == "sqlite":
            place_store(Path(address))
        yield address


@pytest.fixture
def shared_address(new_store: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a store on PostgreSQL, which agents share, without a run."""
    address = new_store(f"t{abs(hash(request.node.nodeid))}")
    yield address
    drop_database(address)


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


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
