"""How long `farm serve` takes to show the report of a run to many readers at once, and what memory it takes.

    python bench/serve.py                 20 readers of a run of 840 jobs, three pages each: a minute
    python bench/serve.py --live          the same while a run records an attempt ten times a second
    python bench/serve.py --quick         4 readers of a run of 60 jobs

Makes a store as bench/report.py does, starts `farm serve` on loopback, and lets that many readers ask for the same
report at the same time, each for the next page when it has read the one before.

The last line is one JSON object: `first_s` (the first reader of all, alone), `median_s` and `worst_s` of the readers
together, `megabytes` of a page, and of the server `cpu_s`, what its processor time was, and `peak_mb`, resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from report import attempt_of, fill, make_jobs
from store import FACTS

from farm.store.records import RunRecord
from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def serving(state: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the server meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", "serve", "--port", "0", "--json"],
        env={**os.environ, "FARM_STATE_DIR": str(state), "FARM_CACHE_DIR": str(state / "cache")},
        cwd=state,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1].strip("/"))
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextlib.contextmanager
def recording(state: Path, count: int) -> Iterator[None]:
    """Record attempts of an unfinished run meanwhile."""
    jobs, ended = make_jobs(count), threading.Event()

    def record() -> None:
        with open_store(state / "farm.db") as store:
            run_id = store.begin_run(RunRecord("farm run", "ada", "bench", FACTS))
            store.plan_jobs(run_id, jobs)
            for job in jobs:
                if ended.wait(0.1):
                    return
                store.record_attempt(
                    run_id, attempt_of(job, time.time_ns() // 1_000_000, random.Random(job.id), fails=False)
                )

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read(port: int, path: str) -> tuple[float, int]:
    """Return how long one page took, in seconds, and its bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.request("GET", path, headers={"Accept": "text/html"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, answer.status
        return time.perf_counter() - began, len(body)


def peak_mb(pid: int) -> int:
    """Return the most resident memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=840)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--pages", type=int, default=3, help="of each reader")
    parser.add_argument("--live", action="store_true", help="while a run records")
    parser.add_argument("--quick", action="store_true", help="60 jobs, 5 runs, 4 readers")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.runs, arguments.readers = 60, 5, 4
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        state = Path(folder)
        path = f"/runs/{fill(state, arguments.jobs, arguments.runs)}"
        live = recording(state, arguments.jobs) if arguments.live else contextlib.nullcontext()
        with serving(state) as (process, port), live:
            first, nbytes = read(port, path)
            took: list[float] = []

            def reader() -> None:
                took.extend(read(port, path)[0] for _ in range(arguments.pages))

            threads = [threading.Thread(target=reader) for _ in range(arguments.readers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            cpu, peak = cpu_seconds(process.pid), peak_mb(process.pid)
    assert len(took) == arguments.readers * arguments.pages
    result = {
        "jobs": arguments.jobs,
        "readers": arguments.readers,
        "first_s": round(first, 2),
        "median_s": round(statistics.median(took), 2),
        "worst_s": round(max(took), 2),
        "megabytes": round(nbytes / 1e6, 2),
        "cpu_s": round(cpu, 1),
        "peak_mb": peak,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
