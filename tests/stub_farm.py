"""Farm without compiler and simulator: virtual devices whose runner is a stub that sleeps; its record of jobs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import random
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from made import write_bundle

from farm.base.hashes import sha256_of
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import INPUTS, MODEL, REFERENCES, TensorSpec
from farm.builds.bundles.cache import BundleCache
from farm.builds.runtime.runtime import Runtime
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.device import Device
from farm.devices.virtual.boot import boot
from farm.devices.virtual.faults import fired, randomize
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.results.attempt import Stage, Verdict
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Limits, Target, Tolerance

# Record of the jobs on stub devices with their times, in files that are independent of stores, leases and fences.
#
# A stub slot holds a lock of its device's file as long as it runs a job, which the kernel releases when its process
# dies, and appends a line when a job begins and when it ends.


_BEGAN, _ENDED, _DOUBLE = "began", "ended", "double"


@dataclass(frozen=True)
class Ran:
    """Execution of a job."""

    device: str
    job: str
    run: str
    began_s: float
    """Seconds on the monotonic clock that all processes of a machine share."""
    ended_s: float | None
    """End of the execution; None if its process was killed."""
    double: bool
    """True if another execution was on the device at the start."""


class Evidence:
    """Writes in a stub slot."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{device}.log", os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o644)

    @contextmanager
    def running(self, job: str, run: str) -> Iterator[None]:
        """Record that `job` of `run` is on the device inside the block."""
        word = _BEGAN
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            word = _DOUBLE
        self._note(word, job, run)
        try:
            yield
        finally:
            self._note(_ENDED, job, run)
            if word == _BEGAN:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _note(self, word: str, job: str, run: str) -> None:
        os.write(self._file, f"{word}\t{now_s():.6f}\t{os.getpid()}\t{run}\t{job}\n".encode())

    def close(self) -> None:
        os.close(self._file)


def now_s() -> float:
    """Return the time that evidence is on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def executions(folder: Path) -> list[Ran]:
    """Return everything that ran on the devices of `folder`, in the order of its beginning."""
    found = [ran for file in sorted(folder.glob("*.log")) for ran in _of_device(file)]
    return sorted(found, key=lambda ran: ran.began_s)


def _of_device(file: Path) -> Iterator[Ran]:
    open_ones: dict[tuple[str, str, str], tuple[float, bool]] = {}
    for line in file.read_text().splitlines():
        word, at, pid, run, job = line.split("\t")
        if word == _ENDED:
            began_s, double = open_ones.pop((pid, run, job))
            yield Ran(file.stem, job, run, began_s, float(at), double)
        else:
            open_ones[pid, run, job] = (float(at), word == _DOUBLE)
    for (_, run, job), (began_s, double) in open_ones.items():
        yield Ran(file.stem, job, run, began_s, None, double)


def overlaps(found: Sequence[Ran]) -> list[tuple[Ran, Ran]]:
    """Return pairs of simultaneous executions on one device, by their times alone, independently of the locks."""
    pairs = []
    last: dict[str, Ran] = {}
    for ran in found:
        before = last.get(ran.device)
        if ran.double or (before and before.ended_s is not None and before.ended_s > ran.began_s):
            pairs.append((before or ran, ran))
        if not before or (ran.ended_s or 0) > (before.ended_s or 0):
            last[ran.device] = ran
    return pairs


# Farm without a compiler and without a simulator: virtual devices whose runner is a stub that sleeps.
#
# For benchmarks of the farm itself: thousands of jobs, dozens of devices and planted failures. The runner
# (stub_runner.c) is a stub, and the program of a bundle is a word that names its behaviour. All else is real.


SOC = "SM8650"
SUITE = "stub"
FINE = "pass"
EXPECTED = {
    FINE: (Verdict.PASSED, Stage.DONE),
    "wrong": (Verdict.FAILED, Stage.NUMERICS),
    "crash": (Verdict.FAILED, Stage.EXECUTE),
    "hang": (Verdict.FAILED, Stage.EXECUTE),
    "refused": (Verdict.FAILED, Stage.LOAD),
}
"""Behaviours of the stub, with the expected classification: all except the first are failures of the code."""

_SOURCE = Path(__file__).with_name("stub_runner.c")
ELEMENTS = 16
"""Number of a program's inputs, and of its outputs, where its case has no other."""
_TARGET = Target(SOC, "htp", "8a8w")
_EXACT = Limits(sqnr_db=60.0)
_TOLERANCE = {_TARGET.precision: Tolerance(fp32=_EXACT, quantized=_EXACT)}
# The health check is not part of the measurement.
_HEALTH_CHECK_MS = 1


@dataclass(frozen=True)
class StubFarm:
    """Parts of a RunPlan; ends with its supervisor."""

    cache_root: Path
    jobs: tuple[PlannedJob, ...]
    health_checks: tuple[PlannedJob, ...]
    devices: tuple[Device, ...]
    runtimes: dict[str, Runtime]
    """Runtimes by the device's serial."""
    behaviours: dict[str, str]
    """Behaviours by job id, each a name of EXPECTED."""
    latency_ms: int
    """Least duration of a job on its device."""
    server: AdbServer
    roots: dict[str, Path]
    """Folder of each virtual device by its serial, where faults are asked for: farm/devices/virtual/faults.py."""

    def fired(self) -> Counter[str]:
        """Return how often each kind of fault struck so far."""
        return Counter(fault["kind"] for root in self.roots.values() for fault in fired(root))


def make_stub_farm(
    folder: Path,
    *,
    devices: int,
    jobs: int,
    latency_ms: int,
    planted: Mapping[str, int],
    supervisor: Supervisor,
    fault_rate: float = 0.0,
    fault_seed: int = 0,
) -> StubFarm:
    """Return a farm with `devices` running virtual devices, and `jobs` jobs whose bundles are in a cache.

    `planted` has the number of jobs with another behaviour than to pass, by the names of EXPECTED; `fault_seed` spreads
    them among the others. All files are below `folder`, which has to be suitable for a virtual device.
    Raises InfraError, and CalledProcessError without a C compiler.
    """
    runtime = stub_runtime(folder)
    cache = BundleCache(folder / "cache")
    words = [name for name, count in planted.items() for _ in range(count)]
    words += [FINE] * (jobs - len(words))
    random.Random(fault_seed).shuffle(words)
    keys = {word: make_bundle(cache, f"{word} {latency_ms}") for word in set(words)}
    named = [(Job(stub_case(f"{word}_{number:05}"), _TARGET), word) for number, word in enumerate(words)]
    health_check_key = make_bundle(cache, f"{FINE} {_HEALTH_CHECK_MS}")
    server = start_adb_server(supervisor, folder / "adb")
    booted = boot(supervisor, server, [SOC] * devices, folder / "devices")
    roots = {device.serial: folder / "devices" / device.serial for device in booted}
    for root in roots.values():
        randomize(root, fault_rate, fault_seed)
    planned = tuple(PlannedJob(job, keys[word], cached=True) for job, word in named)
    checks = health_check_jobs(tuple(one.job for one in planned))
    return StubFarm(
        cache_root=cache.root, jobs=planned,
        health_checks=tuple(PlannedJob(job, health_check_key, cached=True) for job in checks),
        devices=tuple(booted), runtimes={device.serial: runtime for device in booted},
        behaviours={job.id: word for job, word in named}, latency_ms=latency_ms, server=server,
        roots=roots,
    )  # fmt: skip


def stub_runtime(folder: Path) -> Runtime:
    """Write the compiled stub into `folder` and return it as the runtime of a virtual device."""
    folder.mkdir(parents=True, exist_ok=True)
    runner = folder / "stub_runner"
    runner.write_bytes(_compiled_stub())
    runner.chmod(0o755)
    return as_runtime(runner)


@functools.cache
def _compiled_stub() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        runner = Path(folder, "stub_runner")
        subprocess.run(["cc", "-O2", "-o", str(runner), str(_SOURCE)], check=True)
        return runner.read_bytes()


def as_runtime(runner: Path) -> Runtime:
    """Return the compiled stub as the runtime of a virtual device."""
    sha256 = sha256_of(runner)
    digest = hashlib.sha256(f"{runner.name}\0{sha256}\0".encode()).hexdigest()
    return Runtime(
        {runner.name: runner}, digest, runner.name, {"runner": sha256}, "simulator", hashes={runner.name: sha256}
    )


def make_bundle(cache: BundleCache, words: str) -> str:
    """Return the key of a bundle whose program is `words`, and whose references are its input."""
    key = hashlib.sha256(f"stub {words}".encode()).hexdigest()
    return cache.build(key, lambda folder: fill_bundle(folder, key, words)).manifest.key


def words_of(case: Case) -> str:
    """Return the stub runner's words for `case`, from its `words`; the health check, a case of farm's own, passes."""
    return str(case.kwargs.get("words", f"{FINE} {_HEALTH_CHECK_MS}"))


def fill_bundle(folder: Path, key: str, words: str, elements: int = ELEMENTS, soc: str = SOC) -> None:
    """Write the files of the bundle `key` into `folder`: the program is `words`, the references are its input."""
    tensor = struct.pack(f"<{elements}f", *range(1, elements + 1))
    contents = {MODEL: f"{words}\n".encode(), f"{INPUTS}/input_0_0.raw": tensor}
    contents |= {f"reference_{kind}/output_0_0.raw": tensor for kind in REFERENCES}
    specs = (TensorSpec((elements,), "float32"),)
    job_id = f"{SUITE}/{words.split(maxsplit=1)[0]}[{_TARGET}]"
    write_bundle(folder, contents, key=key, job_id=job_id, soc=soc, inputs=specs, outputs=specs)


def stub_case(name: str, words: str = "") -> Case:
    """Return a case of the stub; `words` are the program of a bundle that is compiled of it."""
    return Case(
        SUITE, name, "stub:Stub", (InputSpec((ELEMENTS,)),), precisions=(_TARGET.precision,), tolerances=_TOLERANCE,
        kwargs={"words": words} if words else {},
    )  # fmt: skip
