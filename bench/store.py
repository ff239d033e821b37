"""Times of a store with a million measurements: recording a run, and two commands that read.

    python bench/store.py                                1,000,000 measurements in SQLite: two minutes
    python bench/store.py --quick                        20,000
    python bench/store.py --store postgresql://...       in an empty database of a PostgreSQL server

The store is a demo store (`farm/serve/demo.py`) of one SoC with ten series per job. Three more runs are recorded as
`farm run` does, attempt by attempt; the best counts. `farm history` of one job and `farm status` are processes of their
own, the best of five.

The last line is one JSON object, times in seconds: `measurements`, `ingest`, `history`, `status`, each with the
processor time of this process or of the command as `_cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serve import fill

from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.serve import demo
from farm.store.database import Database
from farm.store.queries.grid import JobFilter
from farm.store.records import RunRecord
from farm.store.store import Store
from farm.suites.suite import Case, InputSpec, Job, Target

DEVICE = Device(serial="phone", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
METRICS = ("latency", "sqnr_fp32[0]", *(f"metric{number}" for number in range(8)))
RECORDED = 3
FACTS = {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "hardware"}


def make_jobs(count: int) -> list[Job]:
    spec = (InputSpec(shape=(1, 3)),)
    return [
        Job(Case("suite", f"case_{n}", module="torch.nn:ReLU", inputs=spec), Target("SM8650", "htp", "8a8w"))
        for n in range(count)
    ]


def measured(draw: random.Random) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(name, "ns", Direction.LOWER, tuple(draw.uniform(1e6, 1.1e6) for _ in range(3))) for name in METRICS
    )


def attempt_of(job: Job, started_ms: int, draw: random.Random) -> Attempt:
    verdict = Verdict.FAILED if draw.random() < 0.01 else Verdict.PASSED
    reason = "output 0 is off" if verdict is Verdict.FAILED else ""
    return Attempt(
        job.id, verdict, Stage.DONE, reason, DEVICE.serial, started_ms, 0.2, bundle_key="b" * 64,
        measurements=measured(draw),
    )  # fmt: skip


def record_run(store: Store, jobs: list[Job], started_ms: int, draw: random.Random) -> str:
    """Record a run as `farm run` does."""
    run_id = store.begin_run(RunRecord("farm run --nightly", "ci", "bench", FACTS, started_ms, "nightly"))
    store.plan_jobs(run_id, jobs)
    store.record_device(run_id, DEVICE)
    for job in jobs:
        store.record_attempt(run_id, attempt_of(job, started_ms, draw))
    store.finish_run(run_id, 0)
    return run_id


def command_seconds(environment: dict[str, str], *arguments: str) -> tuple[float, float]:
    """Return the best of five: wall time, and processor time of the command alone."""
    taken = []
    for _ in range(5):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "farm.cli.main", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append((wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return min(wall for wall, _ in taken), min(processor for _, processor in taken)


def ingest_seconds(store: Store, jobs: list[Job], started_ms: int, draw: random.Random) -> tuple[float, float]:
    """Return the best of three runs, wall and processor time."""
    taken = []
    for number in range(RECORDED):
        started, processor = time.perf_counter(), time.process_time()
        record_run(store, jobs, started_ms + number * 60_000, draw)
        taken.append((time.perf_counter() - started, time.process_time() - processor))
    return min(wall for wall, _ in taken), min(processor for _, processor in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 measurements")
    parser.add_argument("--store", help="where to make it; must be empty")
    arguments = parser.parse_args()
    count, nights = (200, 10) if arguments.quick else (2000, 50)
    draw, jobs = random.Random(1), make_jobs(count)
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        address = arguments.store or str(Path(folder, "farm.db"))
        size = demo.Size(nights=nights - RECORDED, cases=count, socs=("SM8650",), metrics=METRICS)
        database = Database(address)
        with Store(database) as store:
            if store.runs.latest_id():
                sys.exit(f"{address} is not empty")
            fill(store, database, Path(folder), size)
            job_id = store.grid.jobs(store.grid.nightly_runs(None, 1), JobFilter(suite="demo_operators"))[0].job_id
            ingest, ingest_cpu = ingest_seconds(store, jobs, time.time_ns() // 1_000_000 - 3_600_000, draw)
        print(f"{count} jobs, {nights} runs; of the last {RECORDED} the quickest was recorded in {ingest:.2f} s")
        environment = {**os.environ, "FARM_STORE": address, "FARM_STATE_DIR": folder}
        history, history_cpu = command_seconds(environment, "history", job_id, "--branch", "main")
        status, status_cpu = command_seconds(environment, "status")
        result = {
            "measurements": count * nights * len(METRICS),
            "ingest": round(ingest, 3),
            "ingest_cpu": round(ingest_cpu, 3),
            "history": round(history, 3),
            "history_cpu": round(history_cpu, 3),
            "status": round(status, 3),
            "status_cpu": round(status_cpu, 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
