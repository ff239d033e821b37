"""What the controller decided before anything runs, as a file that every worker reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farm.devices.device import Device
from farm.engine.profile import Profile
from farm.execution.optrace import OptraceTools
from farm.runtime.runtime import Runtime
from farm.suites import Job


class PlannedJob(msgspec.Struct, frozen=True):
    """One job and the key of its bundle."""

    job: Job
    key: str
    cached: bool
    """The bundle was there when the run began."""


class RunPlan(msgspec.Struct, frozen=True):
    """One run: jobs in dispatch order, devices, and where things are."""

    run_id: str
    folder: Path
    """Of this run: plan, build replies, raw results, logs."""
    cache_root: Path
    jobs: tuple[PlannedJob, ...]
    devices: tuple[Device, ...]
    runtimes: dict[str, Runtime]
    """By SoC."""
    iterations: int
    warm_up: int
    timeout_s: float
    artifact_root: Path
    """Where files of attempts are kept."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """The DSP's heap is measured, and nothing else."""
    optrace: OptraceTools | None = None
    """What makes the SDK's timelines; only for a run that wants them."""
    anchors: tuple[PlannedJob, ...] = ()
    """What sessions keep loaded, by SoC: see anchor.py."""

    @property
    def path(self) -> Path:
        """The file it is kept in."""
        return self.folder / "plan.json"

    @property
    def workers(self) -> Path:
        """A folder in which every worker process leaves a file that is called like its pid."""
        return self.folder / "workers"

    def write(self) -> None:
        """Write it, for workers to read."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))


def read_plan(path: Path) -> RunPlan:
    """Return the plan in a file that `RunPlan.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RunPlan, dec_hook=lambda kind, text: kind(text))
