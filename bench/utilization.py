"""Utilization of a farm's devices, and processor time of a job: many devices on one machine, without faults.

    python bench/utilization.py [--jobs 150] [--latency-ms 200] [--against CHECKOUT] [--quick]

The runner is a stub that sleeps; all other parts are real (tests/stub_farm.py). `devices` has a share by the number of
devices: the time of an ideal schedule over the time from the first job's start to the last job's end. With 8 devices
`own_ms_per_job` is all the processor time of controller and workers, their start and end included, by the number of
jobs; `own_ms_per_job_while_busy` is the processor time of a job while all devices have jobs. `one_job_cpu_s` is the
processor time of all of farm's processes together, and of adb's server, for a warm `farm run -k conv2d --virtual 1` on
Qualcomm's simulator; the time of its virtual device, above all of the simulator, is `one_job_devices_cpu_s`: a phone
does that work itself. Farm's own processes are the command, its workers and reapers, and all other children. With
`--against` the job also runs with the farm of another checkout, alternately, and `one_job_cpu_ratio` is `one_job_cpu_s`
by the other farm's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from empty_cache import python_of
from stub_farm import make_stub_farm
from stub_run import run_stub_farm, spans

from farm.base.processes import Supervisor

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_EVERY_S = 0.1
_EVERY_OF_A_SHORT_COMMAND_S = 0.01
# A search for new processes reads all of /proc, and costs more than reading the known ones.
_LOOK_EVERY = 10
NOTICED_S = _LOOK_EVERY * _EVERY_S + _EVERY_S
"""Longest time in seconds until a sampler knows a new process, with all of its processor time."""
_PR_SET_CHILD_SUBREAPER = 36
_DEVICE, _ADB, _OWN = "virtual device", "adb server", "farm"
# Programs of a virtual device, which waits for them: after their end their time is in the device's.
_PROGRAM = "program of a virtual device"


class Sampler:
    """Sampler of the processor time of this process and its descendants, as a context."""

    def __init__(self, root: int = 0, every_s: float = _EVERY_S) -> None:
        self._root, self._every_s = root or os.getpid(), every_s
        self._samples: list[tuple[float, Counter[str]]] = []
        self._last: dict[int, tuple[str, float]] = {}
        self._looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def between(self, begin: float, end: float, part: str = _OWN) -> float:
        """Return the processor seconds of a part between two moments, as `time.time()` gives them."""
        return self._at(end, part) - self._at(begin, part)

    @property
    def total(self) -> Mapping[str, float]:
        """Processor seconds by part, of processes as they were last seen."""
        return self._samples[-1][1]

    def _at(self, moment: float, part: str) -> float:
        for (early, before), (late, after) in zip(self._samples, self._samples[1:], strict=False):
            if early <= moment <= late:
                return before[part] + (after[part] - before[part]) * (moment - early) / (late - early)
        raise AssertionError("nothing was sampled then")

    def _run(self) -> None:
        while True:
            self._sample()
            if self._end.wait(self._every_s):
                self._sample()
                return

    def _sample(self) -> None:
        if self._looks % (_LOOK_EVERY if self._every_s == _EVERY_S else 1) == 0:
            self._last |= {
                process: (part, 0.0) for process, part in _descendants(self._root).items() if process not in self._last
            }
        self._looks += 1
        for process, (part, _) in self._last.items():
            known = _times(process)
            if known is not None:
                self._last[process] = part, known[1] + (known[2] if part in (_DEVICE, _PROGRAM) else 0.0)
            elif part == _PROGRAM:
                self._last[process] = part, 0.0
        found: Counter[str] = Counter()
        for part, seconds in self._last.values():
            found[_DEVICE if part == _PROGRAM else part] += seconds  # type: ignore[assignment]
        # The time of this thread belongs to the bench.
        if self._root == os.getpid():
            found[_OWN] -= time.thread_time()  # type: ignore[assignment]
        self._samples.append((time.time(), found))


def one_job(rounds: int, *checkouts: Path | None) -> list[dict[str, float]]:
    """Return the processor seconds of a warm run of one job by part, median of `rounds`, and its wall time.

    From the start of `farm run -k ... --virtual 1` to its end, when the report is written; all processes that it
    started are waited for. The farms of `checkouts`, None for this one, run alternately. Raises CalledProcessError when
    a run fails.
    """
    words = ["-P", "-m", "farm.cli.main", "run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d"]
    # A user's Python writes bytecode.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    commands = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, checkout in enumerate(checkouts):
            # An older farm does not open the store of a newer one.
            own = {**env, "FARM_STATE_DIR": f"{folder}/{number}"}
            commands.append(([python_of(checkout, own) if checkout else sys.executable, *words], own))
        found = [[_run(*command) for command in commands] for _ in range(rounds + 1)][1:]
    return [
        {name: statistics.median(one[name] for one in runs) for name in runs[0]} for runs in zip(*found, strict=True)
    ]


def _run(argv: list[str], env: dict[str, str]) -> dict[str, float]:
    # A process that outlives its parent, as the reaper does, is waited for as well.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [*argv, "--virtual", "1"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with Sampler(process.pid, _EVERY_OF_A_SHORT_COMMAND_S) as sampler:
        output, _ = process.communicate()
    wall_s = time.perf_counter() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, output)
    _wait_for_children()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    others = {part: sampler.total.get(part, 0.0) for part in (_DEVICE, _ADB)}
    return {_OWN: all_s - sum(others.values()), **others, "wall": wall_s}


def _wait_for_children() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _descendants(root: int) -> dict[int, str]:
    """Return the part that `root` and each process below it belong to."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        known = _times(int(path.name))
        if known is not None:
            children.setdefault(known[0], []).append(int(path.name))
    parts, waiting = {root: _OWN}, [root]
    while waiting:
        process = waiting.pop()
        for child in children.get(process, ()):
            above = parts[process]
            parts[child] = _part(child) if above == _OWN else _PROGRAM if above == _DEVICE else above
            waiting.append(child)
    return parts


def _times(process: int) -> tuple[int, float, float] | None:
    """Return the parent of a process, its processor seconds, and its waited-for children's."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    own, waited = (sum(map(int, fields[n : n + 2])) * _TICK_S for n in (11, 13))
    return int(fields[1]), own, waited


def _part(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return _OWN
    # Checkouts of before 28 November 2026 have another package.
    if b"farm.devices.virtual" in words or b"farm.virtual" in words:
        return _DEVICE
    return _ADB if words[0].endswith(b"adb") else _OWN


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
    result = {
        "devices": {str(count): round(one["share"], 3) for count, one in figures.items()},
        "own_ms_per_job": round(costs["own_ms_per_job"], 2),
        "own_ms_per_job_while_busy": round(costs["own_ms_per_job_while_busy"], 2),
        "one_job_cpu_s": round(cpu_s[0], 3),
        "one_job_devices_cpu_s": round(shorts[0]["virtual device"], 3),
        "one_job_cpu_ratio": round(cpu_s[0] / cpu_s[1], 3) if arguments.against else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
