"""Times of a store with a million measurements: recording a run, and two commands that read.

    python bench/store.py                                1,000,000 measurements in SQLite: two minutes
    python bench/store.py --quick                        20,000
    python bench/store.py --store postgresql://...       in an empty database of a PostgreSQL server

The store has nightly runs of 2,000 jobs with ten series each. Three more runs are recorded as `farm run` does, attempt
by attempt; the best counts. `farm history` of one job and `farm status` are processes of their own, the best of five.

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
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select, text, update

from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store import rows, schema
from farm.store.database import Database
from farm.store.records import RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target

DEVICE = Device(serial="phone", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
METRICS = 10
RECORDED = 3
DAY_MS = 86_400_000
FACTS = {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "hardware"}


def make_jobs(count: int) -> list[Job]:
    spec = (InputSpec(shape=(1, 3)),)
    return [
        Job(Case("suite", f"case_{n}", module="torch.nn:ReLU", inputs=spec), Target("SM8650", "htp", "8a8w"))
        for n in range(count)
    ]


def measured(draw: random.Random) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(f"metric_{n}", "ns", Direction.LOWER, tuple(draw.uniform(1e6, 1.1e6) for _ in range(3)))
        for n in range(METRICS)
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


def copy_run(connection: Connection, pattern: str, started_ms: int) -> None:
    """Copy the rows of a run to another run, which is faster than recording it, and equal for the queries."""
    run_id = rows.new_run_id(started_ms)
    run = dict(connection.execute(select(schema.run).where(schema.run.c.id == pattern)).mappings().one())
    connection.execute(insert(schema.run), [{**run, "id": run_id, "started_ms": started_ms}])
    devices = connection.execute(select(schema.run_device).where(schema.run_device.c.run_id == pattern)).mappings()
    connection.execute(insert(schema.run_device), [{**row, "run_id": run_id} for row in devices])
    new_ids: dict[str, dict[int, int]] = {"run_job": {}, "attempt": {}}
    for table, parent, column in (
        (schema.run_job, "", ""),
        (schema.attempt, "run_job", "run_job_id"),
        (schema.measurement, "attempt", "attempt_id"),
    ):
        found = _rows_of(connection, table, pattern)
        first = connection.scalar(select(table.c.id).order_by(table.c.id.desc()).limit(1)) if "id" in table.c else 0
        for number, row in enumerate(found, start=1):
            if parent:
                row[column] = new_ids[parent][row[column]]
            else:
                row["run_id"] = run_id
            if "id" in row:
                new_ids[table.name][row["id"]] = row["id"] = (first or 0) + number
            if "started_ms" in row:
                row["started_ms"] = row["recorded_ms"] = started_ms
        connection.execute(insert(table), found)
    # The copied rows of run_job still name the attempts of the original run.
    decides = select(schema.attempt.c.id).where(schema.attempt.c.run_job_id == schema.run_job.c.id).scalar_subquery()
    of_run = schema.run_job.c.run_id == run_id
    connection.execute(update(schema.run_job).where(of_run).values(decisive_attempt_id=decides))


def count_on(connection: Connection) -> None:
    """Set PostgreSQL's sequences after the copied rows, and update its statistics."""
    if connection.dialect.name == "postgresql":
        for table in ("run_job", "attempt"):
            query = f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"  # noqa: S608
            connection.execute(text(query))
        connection.execute(text("ANALYZE"))


def _rows_of(connection: Connection, table: Any, run_id: str) -> list[dict[str, Any]]:
    run_job, attempt = schema.run_job, schema.attempt
    query = select(table).where(run_job.c.run_id == run_id)
    if table is attempt:
        query = query.join(run_job, run_job.c.id == attempt.c.run_job_id)
    elif table is not run_job:
        query = query.join(attempt, attempt.c.id == table.c.attempt_id).join(
            run_job, run_job.c.id == attempt.c.run_job_id
        )
    return [dict(row) for row in connection.execute(query).mappings()]


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
        now_ms = time.time_ns() // 1_000_000
        with open_store(address) as store:
            if store.runs.latest_id():
                sys.exit(f"{address} is not empty")
            pattern = record_run(store, jobs, now_ms - nights * DAY_MS, draw)
            database = Database(address)
            for night in range(1, nights - RECORDED):
                database.write(partial(copy_run, pattern=pattern, started_ms=now_ms - (nights - night) * DAY_MS))
            database.write(count_on)
            database.close()
            ingest, ingest_cpu = ingest_seconds(store, jobs, now_ms - 3_600_000, draw)
        print(f"{count} jobs, {nights} runs; of the last {RECORDED} the quickest was recorded in {ingest:.2f} s")
        environment = {**os.environ, "FARM_STORE": address, "FARM_STATE_DIR": folder}
        job_id = jobs[count // 2].id
        history, history_cpu = command_seconds(environment, "history", job_id)
        status, status_cpu = command_seconds(environment, "status")
        result = {
            "measurements": count * nights * METRICS,
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
