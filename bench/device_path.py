"""Cost of the way to a device, compared with upstream's SimpleADB and `adb push`, all on one virtual device.

    python bench/device_path.py           60 jobs of quantized_ops, a 1 GB file, 10,000 jobs in one session: 6 minutes
    python bench/device_path.py --quick   2 jobs of smoke, 20 MB, 60 jobs

The last line is one JSON object:

* speedup_vs_simpleadb: wall time of SimpleADB's push, execute and pull of all jobs, over the time of one session. Steps
  that a device needs once are done before: SimpleADB's libraries; the session's libraries and the start of its runner.
  Both run the same .pte files with the same runner, once a sample.
* repushed_bytes: bytes of runtime and .pte that a second session pushes for the same jobs.
* overhead_ms_p50: median over the jobs of their wall time in the session less the runner's own inference time.
* push_ratio_vs_adb: speed of pushing the file, over the speed of `adb push`; the median of several pairs.
* rss_bytes_per_job: slope of resident memory over the jobs of one session, of runner and host together.

Bundles are compiled before the clock starts, in a cache that stays: FARM_CACHE_DIR, or farm's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Iterator, Sequence

import simpleadb

from farm.base.config.settings import load_config
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.runtime.runtime import Runtime, simulator_runtime
from farm.builds.toolchains.selection import prepare
from farm.devices.adb.protocol import adb_target
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.execution.content_store import Workspace
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.boot import boot
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.results.runner_report import RunnerReport, parse_report
from farm.suites.suite import Case, Job, Target

SOC = "SM8650"
# Same as SimpleADB: one execution of every sample, no profile.
OPTIONS = RunnerOptions(iterations=1, warm_up=0, timeout_s=60)
MEMORY_SAMPLES = 50


def ready_bundles(suite: str, count: int, state: Path, *more: str) -> list[Bundle]:
    """Compile missing bundles with `farm run`, which also shows that every job passes, and return the bundles."""
    print(f"compiling {suite} for {SOC}, unless it is", file=sys.stderr)
    argv = [sys.executable, "-m", "farm.cli.main", "run", "--soc", SOC, "--suite", suite, "--precision", "8a8w"]
    done = subprocess.run(
        [*argv, "--virtual", "1", "--json", *more],
        env={**os.environ, "FARM_STATE_DIR": str(state)},
        stdout=subprocess.PIPE,
        check=False,
    )
    view = json.loads(done.stdout)
    cache = BundleCache(load_config().cache_dir)
    passed = [job["attempts"][-1] for job in view["jobs"] if job["attempts"][-1]["verdict"] == "passed"]
    if len(passed) < count:
        sys.exit(f"only {len(passed)} of {count} jobs pass: farm run ended with {done.returncode}")
    return [load_bundle(cache.folder(attempt["bundle_key"])) for attempt in passed[:count]]


class Timed:
    """Times of a job in a session, in milliseconds."""

    def __init__(self, wall_s: float, report: RunnerReport) -> None:
        self.wall_ms = wall_s * 1e3
        self.inference_ms = sum(sum(i.iterations_ns) + sum(i.warm_up_ns) for i in report.inferences) / 1e6
        self.overhead_ms = self.wall_ms - self.inference_ms
        self.load_ms = report.load_ns / 1e6


def run_session(session: DeviceSession, bundles: Sequence[Bundle], folder: Path) -> Iterator[Timed]:
    """Run every bundle and stage the next one meanwhile, like a worker of farm."""
    with ThreadPoolExecutor(1) as aside:
        following = aside.submit(session.stage, bundles[0])
        last = time.perf_counter()
        for number, bundle in enumerate(bundles):
            workspace: Workspace = following.result()
            if number + 1 < len(bundles):
                following = aside.submit(session.stage, bundles[number + 1])
            raw = session.execute(bundle.manifest.job_id, workspace, folder, OPTIONS)
            now = time.perf_counter()
            if raw.error or raw.exit_code != 0:
                sys.exit(f"{bundle.manifest.job_id}: {raw.error or raw.stderr}")
            report = parse_report((folder / "result.json").read_bytes())
            yield Timed(now - last, report)
            last = now


def anchor_bundle() -> Bundle:
    """Return the program that farm's sessions keep loaded; `farm run` has compiled it."""
    config = load_config()
    target = Target(SOC, "htp", "8a8w")
    [anchor] = health_check_jobs((Job(Case("", "", "", ()), target),))
    key = bundle_key(anchor, prepare(config).versions)
    return load_bundle(BundleCache(config.cache_dir).folder(key))


def started_session(
    transport: AdbTransport, runtime: Runtime, bundles: Sequence[Bundle], name: str, folder: Path
) -> DeviceSession:
    """Return a session with its libraries and `bundles` on the device, and its runner up."""
    session = DeviceSession(transport, runtime, name, transport.serial)
    anchor = anchor_bundle()
    session.keep_loaded(anchor)
    session.prepare(bundles)
    list(run_session(session, [anchor], folder))
    return session


def pair_of_pushes(server: AdbServer, transport: AdbTransport, file: Path) -> float:
    """Return the time of `adb push` of the file over the time of farm."""
    place = PurePosixPath("/data/local/tmp/large.bin")
    argv = [str(server.adb), "-s", f"product:{transport.serial}", "push", str(file), str(place)]
    started = time.perf_counter()
    subprocess.run(argv, env={**os.environ, **server.environment()}, stdout=subprocess.DEVNULL, check=True)
    between = time.perf_counter()
    transport.push({place: file})
    ended = time.perf_counter()
    print(f"  adb push {between - started:.2f} s, farm {ended - between:.2f} s", file=sys.stderr)
    return (between - started) / (ended - between)


def push_ratio(server: AdbServer, transport: AdbTransport, folder: Path, size: int, pairs: int) -> float:
    file = folder / "large.bin"
    with file.open("wb") as out:
        for _ in range(size // 1_000_000):
            out.write(os.urandom(1_000_000))
    ratios = [pair_of_pushes(server, transport, file) for _ in range(pairs)]
    file.unlink()
    transport.run(["rm", "-f", "/data/local/tmp/large.bin"], timeout_s=60)
    return statistics.median(ratios)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def runner_pid(storage: Path) -> int:
    """Return the process of the runner, which runs on this machine: its program is an object of the virtual device."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "exe").resolve().is_relative_to(storage) and b"--serve" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    sys.exit("the runner is not there")


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the slope of a straight line through the points, by least squares."""
    jobs, sizes = zip(*points, strict=True)
    return statistics.linear_regression(jobs, sizes).slope


def memory_slope(session: DeviceSession, bundles: Sequence[Bundle], jobs: int, folder: Path, storage: Path) -> float:
    """Return the bytes of resident memory that one job adds, in the runner and here."""
    every = max(1, jobs // MEMORY_SAMPLES)
    cycle = [bundles[number % len(bundles)] for number in range(jobs)]
    runner: list[tuple[int, int]] = []
    host: list[tuple[int, int]] = []
    for number, _ in enumerate(run_session(session, cycle, folder), start=1):
        if number % every == 0:
            runner.append((number, resident_bytes(runner_pid(storage))))
            host.append((number, resident_bytes(os.getpid())))
    # The first tenth fills pools and caches.
    start = len(runner) // 10
    slopes = [slope(points[start:]) for points in (runner, host)]
    for name, points, value in zip(("runner", "host"), (runner, host), slopes, strict=True):
        sizes = [size / 2**20 for _, size in points[start:]]
        print(
            f"  {name}: {sizes[0]:.1f} MiB, at last {sizes[-1]:.1f}, at most {max(sizes):.1f}; "
            f"{value:+.0f} bytes a job",
            file=sys.stderr,
        )
    return sum(slopes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller numbers of everything")
    quick = parser.parse_args().quick
    suite, count, size, many, pairs = "quantized_ops", 60, 10**9, 10_000, 5
    if quick:
        suite, count, size, many, pairs = "smoke", 2, 20_000_000, 60, 3
    more = ["-k", "add or gelu"] if quick else []

    # In memory if possible: otherwise the speed of a disk is measured.
    memory = Path("/dev/shm")  # noqa: S108
    place = memory if os.access(memory, os.W_OK) and os.statvfs(memory).f_bavail * 4096 > 6 * size else None
    with tempfile.TemporaryDirectory(prefix="farm-bench-", dir=place) as name, Supervisor() as supervisor:
        folder = Path(name)
        bundles = ready_bundles(suite, count, folder / "state", *more)
        server = start_adb_server(supervisor, folder / "adb")
        [device] = boot(supervisor, server, [SOC], folder / "devices")
        storage = folder / "devices" / device.serial
        transport = AdbTransport(device.serial, device.address)
        runtime = simulator_runtime(load_config().cache_dir)

        libraries, theirs = simpleadb_seconds(server, device.serial, runtime, bundles, folder)

        started = time.perf_counter()
        session = started_session(transport, runtime, [], "first", folder / "raw")
        setup = time.perf_counter() - started
        started = time.perf_counter()
        session.prepare(bundles)
        cold = list(run_session(session, bundles, folder / "raw"))
        ours = time.perf_counter() - started
        session.close()

        started = time.perf_counter()
        session = started_session(transport, runtime, bundles, "again", folder / "raw")
        setup_again = time.perf_counter() - started
        started = time.perf_counter()
        warm = list(run_session(session, bundles, folder / "raw"))
        again, repushed = time.perf_counter() - started, session.pushed_bytes
        overhead = statistics.median(job.overhead_ms for job in cold)
        print(
            f"{count} jobs: SimpleADB {theirs:.2f} s, session {ours:.2f} s, again with nothing to push {again:.2f} s\n"
            f"  once a device: SimpleADB {libraries:.2f} s (libraries), session {setup:.2f} s (libraries, start), "
            f"again {setup_again:.2f} s (hashes, start); with that {(libraries + theirs) / (setup + ours):.1f} times\n"
            f"  medians, ms a job: wall {statistics.median(job.wall_ms for job in cold):.1f}, inference "
            f"{statistics.median(job.inference_ms for job in cold):.1f}, load "
            f"{statistics.median(job.load_ms for job in cold):.1f}, overhead {overhead:.1f}, again "
            f"{statistics.median(job.overhead_ms for job in warm):.1f}",
            file=sys.stderr,
        )
        print(f"{many} jobs in one session:", file=sys.stderr)
        growth = memory_slope(session, bundles[: min(8, count)], many, folder / "raw", storage)
        session.close()
        print(f"a file of {size // 1_000_000} MB:", file=sys.stderr)
        ratio = push_ratio(server, transport, folder, size, pairs)
        transport.close()
    print(
        json.dumps(
            {
                "speedup_vs_simpleadb": round(theirs / ours, 1),
                "repushed_bytes": repushed,
                "overhead_ms_p50": round(overhead, 2),
                "push_ratio_vs_adb": round(ratio, 2),
                "rss_bytes_per_job": round(growth),
            }
        )
    )


def simpleadb_seconds(
    server: AdbServer, serial: str, runtime: Runtime, bundles: Sequence[Bundle], folder: Path
) -> tuple[float, float]:
    """Return the seconds that SimpleADB takes for its libraries, and for push, execute and pull of all bundles."""
    layout = simpleadb.lay_out(folder / "upstream/layout", runtime, find_soc(SOC).htp_arch)
    measured = simpleadb.run_jobs(
        [simpleadb.job_of(bundle) for bundle in bundles],
        folder / "upstream/outputs",
        device=adb_target(serial),
        soc=SOC,
        layout=layout,
        adb=server.adb,
        environment=server.environment(),
    )
    steps = [statistics.median(step) * 1e3 for step in zip(*measured.jobs, strict=True)]
    print(
        f"SimpleADB, medians, ms a job: push {steps[0]:.0f}, execute {steps[1]:.0f}, pull {steps[2]:.0f}",
        file=sys.stderr,
    )
    return measured.libraries, sum(map(sum, measured.jobs))


if __name__ == "__main__":
    main()
