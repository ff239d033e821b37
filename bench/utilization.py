"""Utilization of a farm's devices, and processor time of a job: many devices on one machine, without faults.

    python bench/utilization.py [--jobs 150] [--latency-ms 200] [--against CHECKOUT] [--quick]

The runner is a stub that sleeps; all other parts are real (tests/stub_farm.py). `devices` has a share by the number of
devices: the time of an ideal schedule over the time from the first job's start to the last job's end. With 8 devices
`own_ms_per_job` is all the processor time of controller and workers, their start and end included, by the number of
jobs; `own_ms_per_job_while_busy` is the processor time of a job while all devices have jobs. `one_job_cpu_s` is the
processor time of all of farm's processes together, and of adb's server, for a warm `farm run -k conv2d --virtual 1` on
Qualcomm's simulator; the time of its virtual device, above all of the simulator, is `one_job_devices_cpu_s`: a phone
does that work itself (bench/processor_time.py). With `--against` the job also runs with the farm of another checkout,
alternately, and `one_job_cpu_ratio` is `one_job_cpu_s` by the other farm's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from processor_time import NOTICED_S, Sampler, one_job
from stub_farm import make_stub_farm
from stub_run import run_stub_farm, spans

from farm.base.processes import Supervisor

KEYS = (
    *("devices", "own_ms_per_job", "own_ms_per_job_while_busy"),
    *("one_job_cpu_s", "one_job_devices_cpu_s", "one_job_cpu_ratio"),
)
# Number of devices of `own_ms_per_job`: it does not fill two cores yet.
_SHOWN_DEVICES = 8


def measure(devices: int, jobs_each: int, latency_ms: int) -> dict[str, float]:
    """Run `jobs_each` jobs on each device and return the measured times and shares."""
    with tempfile.TemporaryDirectory(prefix="farm-utilization-") as name, Supervisor() as supervisor:
        folder = Path(name)
        farm = make_stub_farm(
            folder, devices=devices, jobs=devices * jobs_each, latency_ms=latency_ms, planted={}, supervisor=supervisor
        )
        with Sampler() as sampler:
            done = run_stub_farm(farm, folder, timeout_s=60.0)
    bad = [job.id for job in done.view.jobs if not job.attempts or job.attempts[-1].verdict != "passed"]
    assert not bad, (bad[:3], done.front.notes)
    found = list(spans(done.view))
    first, last = min(begin for _, begin, _ in found), max(end for _, _, end in found)
    # While every device has jobs: neither imports of workers that start nor the end are in it.
    of_device: dict[str, list[tuple[float, float]]] = {}
    for device, begin, end in found:
        of_device.setdefault(device, []).append((begin, end))
    begin = max(min(one[0] for one in jobs) for jobs in of_device.values()) + NOTICED_S
    end = min(max(one[1] for one in jobs) for jobs in of_device.values())
    jobs_then = sum((min(late, end) - max(early, begin)) / (late - early) for _, early, late in found
                    if early < end and late > begin)  # fmt: skip
    seconds = sorted(late - early for _, early, late in found)
    return {
        "share": jobs_each * latency_ms / 1000 / (last - first),
        "span_s": last - first,
        "job_p50_ms": seconds[len(seconds) // 2] * 1000,
        "own_ms_per_job": sampler.total["farm"] / len(found) * 1000,
        "own_ms_per_job_while_busy": sampler.between(begin, end) / jobs_then * 1000,
        "virtual_devices_ms_per_job": sampler.between(begin, end, "virtual device") / jobs_then * 1000,
        "adb_server_ms_per_job": sampler.between(begin, end, "adb server") / jobs_then * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=150, help="for each device")
    parser.add_argument("--latency-ms", type=int, default=200)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5, help="runs of one job")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="checkout of farm to compare one job with")
    parser.add_argument("--quick", action="store_true", help="10 jobs on 1 and 2 devices")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.devices, arguments.rounds = 10, [1, 2], 1
    print("THE RUNNER IS A STUB that sleeps; virtual devices, adb server, workers, leases and store are the real thing")
    # Before `measure` names a cache and a state of its own.
    with tempfile.TemporaryDirectory(prefix="farm-one-job-") as state:
        os.environ["FARM_STATE_DIR"] = state
        shorts = one_job(arguments.rounds, None, *([arguments.against.resolve()] if arguments.against else []))
    for short in shorts:
        print("one job, seconds: " + ", ".join(f"{name} {value:.3g}" for name, value in short.items()), flush=True)
    cpu_s = [short["farm"] + short["adb server"] for short in shorts]
    figures = {}
    for count in arguments.devices:
        figures[count] = measure(count, arguments.jobs, arguments.latency_ms)
        text = ", ".join(f"{name} {value:.3g}" for name, value in figures[count].items())
        print(f"{count:3} devices: {text}", flush=True)
    costs = figures.get(_SHOWN_DEVICES) or figures[arguments.devices[-1]]
    values = (
        {str(count): round(one["share"], 3) for count, one in figures.items()},
        round(costs["own_ms_per_job"], 2),
        round(costs["own_ms_per_job_while_busy"], 2),
        round(cpu_s[0], 3),
        round(shorts[0]["virtual device"], 3),
        round(cpu_s[0] / cpu_s[1], 3) if arguments.against else None,
    )
    print(json.dumps(dict(zip(KEYS, values, strict=True))))


if __name__ == "__main__":
    sys.exit(main())
