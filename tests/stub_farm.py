"""Farm without a compiler and without a simulator: virtual devices whose runner is a stub that sleeps.

For benchmarks of the farm itself: thousands of jobs, dozens of devices and planted failures.
The runner (stub_runner.c) is a stub, and the program of a bundle is a word that names its behaviour. All else is real.
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
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
from farm.devices.virtual.faults import fired
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.results.attempt import Stage, Verdict
from farm.store.cluster.records import PlannedJob
from farm.suites.suite import Case, InputSpec, Job, Limits, Target, Tolerance

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
    booted = boot(supervisor, server, [SOC] * devices, folder / "devices", fault_rate=fault_rate, fault_seed=fault_seed)
    planned = tuple(PlannedJob(job, keys[word], cached=True) for job, word in named)
    checks = health_check_jobs(tuple(one.job for one in planned))
    return StubFarm(
        cache_root=cache.root, jobs=planned,
        health_checks=tuple(PlannedJob(job, health_check_key, cached=True) for job in checks),
        devices=tuple(booted), runtimes={device.serial: runtime for device in booted},
        behaviours={job.id: word for job, word in named}, latency_ms=latency_ms, server=server,
        roots={device.serial: folder / "devices" / device.serial for device in booted},
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
