"""Plan of a run before its first execution, as a file that every device process reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from farm.base.config.retention import FailuresConfig
from farm.base.config.settings import HealthConfig
from farm.builds.runtime.runtime import Runtime
from farm.devices.connect import from_plain
from farm.devices.device import Device
from farm.devices.execution.optrace import OptraceTools
from farm.dispatch.request.profiling import Profile
from farm.suites.suite import Job

# A worker shows that it goes on whenever it waits for something; between that it executes a job, twice where the first
# time ended the runner, moves files and looks for damage.
_SILENCE_SECONDS = 900.0


class PlannedJob(msgspec.Struct, frozen=True):
    """Job and the key of its bundle."""

    job: Job
    key: str
    cached: bool
    """The bundle was there when the run began."""
    failed_before: bool = False
    """True if its newest verdict before this run, on such devices, was failed."""
    expected_s: float | None = None
    """Expected seconds on a device, from its history; None without history."""


class RunPlan(msgspec.Struct, frozen=True):
    """Plan of a run: jobs in dispatch order, devices, and paths."""

    run_id: str
    folder: Path
    """Folder of the run: plan, build replies, raw results, logs."""
    cache_root: Path
    jobs: tuple[PlannedJob, ...]
    devices: tuple[Device, ...]
    runtimes: dict[str, Runtime]
    """Runtimes by the device's serial."""
    iterations: int
    warm_up: int
    timeout_s: float
    artifact_root: Path
    """Folder of files of attempts."""
    reducible: bool = False
    """Iterations and warm-up are farm's own choice."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """The DSP's heap is measured, and nothing else."""
    seconds: int | None = None
    """Programs that generate go on for so long; None: every prompt once."""
    optrace: OptraceTools | None = None
    """Tools for the SDK's timelines, only in a run with them."""
    health_checks: tuple[PlannedJob, ...] = ()
    """Jobs of the health check, one per SoC: see health_check.py."""
    leased: bool = False
    """Devices are leased; otherwise they are this run's own."""
    health: HealthConfig = HealthConfig()
    failures: FailuresConfig = FailuresConfig()

    @property
    def path(self) -> Path:
        """The file it is kept in."""
        return self.folder / "plan.json"

    @property
    def workers(self) -> Path:
        """A folder with a file for every device, by its number, which its worker touches as long as it goes on."""
        return self.folder / "workers"

    @property
    def most_silence_s(self) -> float:
        """After so many seconds without a sign that it goes on a worker is ended."""
        # The requested duration of a job is no silence.
        return _SILENCE_SECONDS + 2 * (self.timeout_s + (self.seconds or 0))

    def prepare_folder(self) -> None:
        """Make empty folders for all processes of the run, and write the plan."""
        for name in ("builds", "workers"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(parents=True)
        for number in range(len(self.devices)):
            (self.workers / str(number)).touch()
        self.write()

    def write(self) -> None:
        """Write it, for workers to read."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))


def read_plan(path: Path) -> RunPlan:
    """Return the plan in a file that `RunPlan.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RunPlan, dec_hook=from_plain)
