"""How much of its devices' time a farm uses: 1, 8 and 32 devices on one machine, without faults.

    python bench/utilization.py [--jobs 150] [--latency-ms 200] [--quick]

The runner is a stub that sleeps; everything else is the real thing (bench/stub_farm.py). The share is what an ideal
schedule would take, from the first job's start to the last one's end, of what it took. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from stub_farm import make_stub_farm
from stub_run import run_stub_farm, spans

from farm.system.processes import Supervisor


def measure(devices: int, jobs_each: int, latency_ms: int) -> dict[str, float]:
    """Run `jobs_each` jobs a device and return what was used, and what of."""
    with tempfile.TemporaryDirectory(prefix="farm-utilization-") as name, Supervisor() as supervisor:
        folder = Path(name)
        farm = make_stub_farm(
            folder, devices=devices, jobs=devices * jobs_each, latency_ms=latency_ms, planted={}, supervisor=supervisor
        )
        cpu, started = os.times(), time.perf_counter()
        done = run_stub_farm(farm, folder, timeout_s=60.0)
        wall = time.perf_counter() - started
        used = os.times()
    bad = [job.id for job in done.view.jobs if not job.attempts or job.attempts[-1].verdict != "passed"]
    assert not bad, (bad[:3], done.front.notes)
    found = list(spans(done.view))
    span = max(end for _, _, end in found) - min(begin for _, begin, _ in found)
    busy = [seconds for job in done.view.jobs for seconds in [job.attempts[-1].seconds]]
    # Workers are children that have ended; devices and adb server end later, and are not in it.
    mine = used.user + used.system - cpu.user - cpu.system
    theirs = used.children_user + used.children_system - cpu.children_user - cpu.children_system
    return {
        "share": jobs_each * latency_ms / 1000 / span,
        "span_s": span,
        "wall_s": wall,
        "job_p50_ms": sorted(busy)[len(busy) // 2] * 1000,
        "controller_ms_per_job": mine / len(busy) * 1000,
        "workers_ms_per_job": theirs / len(busy) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=150, help="for each device")
    parser.add_argument("--latency-ms", type=int, default=200)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quick", action="store_true", help="20 jobs on 1 and 2 devices")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.devices = 20, [1, 2]
    print("THE RUNNER IS A STUB that sleeps; virtual devices, adb server, workers, leases and store are the real thing")
    shares = {}
    for count in arguments.devices:
        found = measure(count, arguments.jobs, arguments.latency_ms)
        shares[str(count)] = round(found["share"], 3)
        print(f"{count:3} devices: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
    print(json.dumps({"devices": shares}))


if __name__ == "__main__":
    sys.exit(main())
