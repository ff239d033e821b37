"""Time from a store with thirty nights to the report of the last one: written, opened in a browser, and served.

    python bench/report.py            2,000 jobs, 30 runs, 20 readers: some minutes
    python bench/report.py --quick    100 jobs, 6 runs, 4 readers

The nights are simulated: one job in forty fails with a long log, and one in fifty needs a second attempt. The report is
written as `farm report` writes it and opened from its file in headless Chromium, each time with a new profile. Then
`farm serve` on loopback answers one reader, who waits until the report is made, and many readers at once. Chromium and
its driver are needed on PATH (Debian: apt-get install chromium chromium-driver).

The last line is one JSON object: `jobs`; `megabytes` of the report; `open_seconds`, navigation to the end of the load
event, median; `write_seconds`, store to file, and of these `background_seconds`, history and artifacts from the store;
`readers`; `first_reader_s`; `served_again_ratio`, median of the readers at once over the first; `server_cpu_s` and
`server_peak_mb`. The goal is less than 6 MB and 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from serve import cpu_s, server
from store import DEVICE, FACTS

from farm.base.config.settings import load_config
from farm.dispatch.request.records import write_report
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.serve import demo
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.store import Store, open_store
from farm.suites.suite import Case, InputSpec, Job, Target

SOCS = ("SM8550", "SM8650", "SM8750", "SM8850")
PRECISIONS = ("8a8w", "16a8w", "16a4w", "fp16")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-dev-shm-usage", "--window-size=1366,768")  # fmt: skip
LOG = "".join(f"[INFO] [Qnn ExecuTorch]: line {n} of what the runner said\n" for n in range(5000))


def make_jobs(count: int) -> list[Job]:
    spec = (InputSpec(shape=(1, 3)),)
    cases = [Case("operators", f"operator_{n}", module="torch.nn:ReLU", inputs=spec) for n in range(-(-count // 16))]
    targets = [Target(soc, "htp", precision) for soc in SOCS for precision in PRECISIONS]
    return [Job(case, target) for case in cases for target in targets][:count]


def attempt_of(job: Job, started_ms: int, draw: random.Random, *, fails: bool, slower: float) -> Attempt:
    usual = random.Random(job.id)
    latency, sqnr = slower * usual.uniform(2e6, 9e6), usual.uniform(30, 60)
    sqnr = 12.0 if fails else sqnr
    broken = ("sqnr 12.0 dB < 20 dB",) * fails
    spread = partial(draw.gauss, 1, 0.02)
    count = {name: float(draw.randrange(1, 90_000)) for name in ("pte_size", "partitions", "delegated_ops")}
    return Attempt(
        job.id, Verdict.FAILED if fails else Verdict.PASSED, Stage.NUMERICS if fails else Stage.DONE,
        "output 0 against fp32: sqnr 12.0 dB < 20 dB" if fails else "", DEVICE.serial, started_ms, 0.2,
        bundle_key=f"{draw.getrandbits(256):064x}", log=LOG if fails else "",
        comparisons=(
            Comparison(0, "fp32", sqnr, 1 - draw.random() / 1e3, draw.random(), None, broken),
            Comparison(0, "quantized", sqnr + 9, 1 - draw.random() / 1e4, draw.random(), None),
        ),
        measurements=(
            Measurement("latency", "ns", Direction.LOWER, tuple(latency * spread() for _ in range(20))),
            Measurement("load_time", "ns", Direction.LOWER, (draw.uniform(1e6, 4e6),)),
            Measurement("htp_cycles", "cycles", Direction.LOWER, tuple(latency * spread() for _ in range(5))),
            Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr,)),
            *(Measurement(name, "count", Direction.LOWER, (value,), exact=True) for name, value in count.items()),
        ),
    )  # fmt: skip


def record_run(store: Store, jobs: list[Job], night: int, runs: int, draw: random.Random) -> str:
    """Record a nightly run; every twentieth job is slower from the middle of `runs` on."""
    last, started_ms = night == runs - 1, time.time_ns() // 1_000_000 - (runs - night) * demo.DAY_MS
    run_id = store.begin_run(RunRecord("farm run --nightly", "ci", "bench", FACTS, started_ms, "nightly"))
    store.plan_jobs(run_id, jobs)
    store.record_device(run_id, DEVICE)
    for place, job in enumerate(jobs):
        files = tuple(ArtifactRecord(f"{draw.getrandbits(256):064x}", 70_000, kind) for kind in ("etdump", "output"))
        slower = 1.12 if place % 20 == 0 and night > runs // 2 else 1.0
        attempt = attempt_of(job, started_ms + place, draw, fails=last and place % 40 == 0, slower=slower)
        if last and place % 50 == 7:
            lost = msgspec.structs.replace(
                attempt, verdict=Verdict.INFRA, stage=Stage.PUSH, reason="phone: push timed out", measurements=(),
                comparisons=(), log="adb: error: failed to copy\n", started_ms=started_ms,
            )  # fmt: skip
            store.record_attempt(run_id, lost)
        store.record_attempt(run_id, attempt, artifacts=files)
    store.finish_run(run_id, 1 if last else 0)
    return run_id


def opened(page: Path) -> float:
    """Return the seconds in which a new browser opens a page."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as profile:
        options = Options()
        options.binary_location = shutil.which("chromium") or sys.exit("chromium is not on PATH")
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            browser.get(page.as_uri())
            took = browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
        finally:
            browser.quit()
    return float(took) / 1000


def fill(state: Path, count: int, runs: int) -> str:
    """Make a store with nightly runs of `count` jobs in `state`, and return the id of the last."""
    draw, jobs = random.Random(1), make_jobs(count)
    with open_store(state / "farm.db") as store:
        return [record_run(store, jobs, night, runs, draw) for night in range(runs)][-1]


def read(port: int, run_id: str) -> float:
    """Return the seconds until a reader has the report of a run."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        began = time.perf_counter()
        connection.request("GET", f"/runs/{run_id}/report", headers={"Accept": "text/html"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        return time.perf_counter() - began


def served(state: Path, run_id: str, readers: int) -> dict[str, float]:
    """Return times of one reader and of many at once with three pages each, and the cost of the server."""
    took: list[float] = []
    with server(f"sqlite:///{state}/farm.db", state) as (port, pid):
        first = read(port, run_id)
        threads = [
            threading.Thread(target=lambda: took.extend(read(port, run_id) for _ in range(3))) for _ in range(readers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server_cpu_s = cpu_s(pid)
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert len(took) == 3 * readers
    assert peak is not None
    return {
        "readers": readers,
        "first_reader_s": round(first, 2),
        "served_again_ratio": round(statistics.median(took) / first, 3),
        "server_cpu_s": round(server_cpu_s, 1),
        "server_peak_mb": int(peak[1]) // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 jobs, 6 runs, 4 readers")
    parser.add_argument("--keep", type=Path, help="leave the report here")
    arguments = parser.parse_args()
    count, runs, opens, readers = (100, 6, 1, 4) if arguments.quick else (2000, 30, 5, 20)
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        state = Path(folder)
        run_id = fill(state, count, runs)
        with open_store(state / "farm.db") as store:
            kept = ArtifactStore(state / "artifacts")
            for file in store.runs.artifacts(run_id):
                path = kept.path(file.sha256)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            page = state / "runs" / run_id / "report.html"
            started = time.perf_counter()
            write_report(store.runs.view(run_id), page, store, msgspec.structs.replace(load_config(), state_dir=state))
            written = time.perf_counter() - started
            started = time.perf_counter()
            store.history.background(run_id)
            background = time.perf_counter() - started
        if arguments.keep:
            shutil.copy(page, arguments.keep)
        result = {
            "jobs": count,
            "megabytes": round(page.stat().st_size / 1e6, 2),
            "open_seconds": round(statistics.median(opened(page) for _ in range(opens)), 3),
            "write_seconds": round(written, 2),
            "background_seconds": round(background, 2),
            **served(state, run_id, readers),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
