#!/usr/bin/env python3
"""Pages of `farm serve` over a million measurements, and readers that poll while a run records results.

    python bench/serve.py            a million measurements in SQLite and in PostgreSQL, 200 readers for 60 s
    python bench/serve.py --quick    a few thousand, for CI

The store is a demo store (`farm/serve/demo.py`) of one SoC. Each database has a line; the last has the worse of both:
`{"grid_ms", "job_ms", "readers", "p99_ms", "errors"}`. Times of pages are medians at the client;
`*_cpu_ms` are of the server alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Iterator

from chaos_store import Cluster, PostgresStore, postgres_cluster

from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.serve import demo
from farm.store.artifacts import ArtifactStore
from farm.store.database import Database
from farm.store.records import RunRecord
from farm.store.store import Store
from farm.suites.suite import Case, InputSpec, Job, Target

# Pages poll so often.
_POLL_S = 2.0
_ASKED = 9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    metrics = ("latency", "sqnr_fp32[0]", *(f"metric{number}" for number in range(1 if quick else 15)))
    cases, nights, readers, seconds = (100, 5, 20, 4.0) if quick else (2000, 30, 200, 60.0)
    size = demo.Size(nights=nights, cases=cases, socs=("SM8650",), metrics=metrics)
    found = []
    with tempfile.TemporaryDirectory(prefix="farm-bench-serve-") as folder:
        found.append(measure("sqlite", f"sqlite:///{folder}/farm.db", Path(folder), size, readers, seconds))
    with postgres_cluster() as cluster, tempfile.TemporaryDirectory(prefix="farm-bench-serve-") as folder:
        if isinstance(cluster, Cluster):
            url = PostgresStore(cluster, "farm").url
            found.append(measure("postgresql", url, Path(folder), size, readers, seconds))
        else:
            print(f"PostgreSQL is left out: {cluster}")
    worst = {name: max(one[name] for one in found) for name in ("grid_ms", "job_ms", "p99_ms")}
    answer = {**worst, "readers": readers, "errors": sum(one["errors"] for one in found)}
    print(json.dumps({name: answer[name] for name in ("grid_ms", "job_ms", "readers", "p99_ms", "errors")}))


def measure(name: str, url: str, folder: Path, size: demo.Size, readers: int, seconds: float) -> dict[str, float]:
    """Fill a store, serve it, and return the times of its pages and of readers during a run."""
    database = Database(url)
    with Store(database) as store:
        began = time.monotonic()
        fill(store, database, folder, size)
        filled_s = time.monotonic() - began
        with server(url, folder) as (port, pid):
            before_s = cpu_s(pid)
            grid_ms, grid_bytes = page(port, f"/grid?limit={size.cases}&nights={size.nights}")
            grid_cpu_ms = 1000 * (cpu_s(pid) - before_s) / _ASKED
            job = quote(store.grid.jobs(store.grid.nightly_runs(None, 1), demo_filter())[0].job_id, safe="")
            before_s = cpu_s(pid)
            job_ms, _ = page(port, f"/jobs/{job}")
            job_cpu_ms = 1000 * (cpu_s(pid) - before_s) / _ASKED
            times, errors = poll(port, store, readers, seconds)
    p99_ms = statistics.quantiles(times, n=100)[98] if len(times) > 1 else 0.0
    found = {
        "database": name,
        "measurements": size.cases * size.nights * len(size.metrics),
        "filled_s": round(filled_s, 1),
        "grid_ms": round(grid_ms, 1),
        "grid_cpu_ms": round(grid_cpu_ms, 1),
        "grid_kb": round(grid_bytes / 1000),
        "job_ms": round(job_ms, 1),
        "job_cpu_ms": round(job_cpu_ms, 1),
        "requests": len(times),
        "p50_ms": round(statistics.median(times), 1),
        "p99_ms": round(p99_ms, 1),
        "errors": errors,
    }
    print(json.dumps(found), flush=True)
    return found  # type: ignore[return-value]


def fill(store: Store, database: Database, folder: Path, size: demo.Size) -> None:
    """Fill an empty store, and update PostgreSQL's statistics."""
    demo.fill(store, database, ArtifactStore(folder / "artifacts"), size)
    if not database.is_sqlite:
        database.write(lambda connection: connection.exec_driver_sql("ANALYZE"))


def demo_filter() -> object:
    from farm.store.queries.grid import JobFilter

    return JobFilter(suite="demo_operators")


@contextlib.contextmanager
def server(url: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Run the server in a process of its own, and yield its port and the id of its process."""
    environment = {
        **os.environ,
        "FARM_STORE": url,
        "FARM_STATE_DIR": str(folder),
        "FARM_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "farm.cli.main", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield int(url.rstrip("/").rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, which other work on the machine hardly changes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page(port: int, path: str) -> tuple[float, int]:
    """Return the median time of a page in ms without its first two answers, and its length."""
    times = []
    for _ in range(_ASKED):
        began = time.perf_counter()
        status, body = get(http.client.HTTPConnection("127.0.0.1", port, timeout=60), path)
        assert status == 200, (path, status)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times[2:]), len(body)


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def poll(port: int, store: Store, readers: int, seconds: float) -> tuple[list[float], int]:
    """Return the times of polled progress in ms, and the number of errors, while a run records attempts."""
    end = time.monotonic() + seconds
    times: list[float] = []
    errors: list[str] = []

    def read(number: int) -> None:
        # Readers do not begin at once.
        time.sleep(_POLL_S * number / readers)
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                status, _ = get(http.client.HTTPConnection("127.0.0.1", port, timeout=30), "/api/v1/progress")
            except OSError as error:
                errors.append(str(error))
            else:
                times.append((time.perf_counter() - began) * 1000)
                if status != 200:
                    errors.append(str(status))
            time.sleep(max(0.0, _POLL_S - (time.perf_counter() - began)))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    record(store, end)
    for thread in threads:
        thread.join()
    return times, len(errors)


def record(store: Store, end: float) -> None:
    """Record a run of about ten results a second until a time."""
    run_id = store.begin_run(RunRecord("farm run", "bench", "bench", {"device_kind": "hardware"}))
    cases = (Case("bench", f"case{n}", module="m:M", inputs=(InputSpec(shape=(1,)),)) for n in range(1000))
    jobs = [Job(case, Target("SM8650", "htp", "8a8w")) for case in cases]
    store.plan_jobs(run_id, jobs)
    for job in jobs:
        if time.monotonic() >= end:
            break
        measured = (Measurement("latency", "ns", Direction.LOWER, (1.0, 2.0, 3.0)),)
        store.record_attempt(run_id, Attempt(job.id, Verdict.PASSED, Stage.DONE, "", measurements=measured))
        time.sleep(0.1)
    store.finish_run(run_id, 0)


if __name__ == "__main__":
    main()
