"""Request of a run, its plan for device processes, and its outcome."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.runs import FailuresConfig
from farm.base.config.settings import HealthConfig
from farm.base.files import write_atomically
from farm.builds.compile.protocol import BuildReply
from farm.builds.runtime.runtime import Runtime
from farm.devices.connect import from_plain
from farm.devices.device import Device
from farm.devices.execution.optrace import OptraceTools
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.profiling import Execution
from farm.dispatch.request.selection import Shard
from farm.store.cluster.records import PlannedJob
from farm.store.records import Purpose, RunView


class RunRequest(Execution, frozen=True, kw_only=True):
    """Request of a run, from the options of `farm run` or a similar command."""

    socs: tuple[str, ...]
    suites: tuple[str, ...]
    backend: str = DEFAULT_BACKEND
    precisions: tuple[str, ...] = ()
    virtual: int = 0
    """Number of virtual devices per SoC; 0 to use attached devices."""
    keyword: str = ""
    """Expression of `-k`; empty for all jobs."""
    most_failures: int | None = None
    """Number of failed jobs after which no other job begins; None for no limit."""
    options: tuple[str, ...] = ()
    """Run-time options, `name=value,value`: every combination of values is a separate target."""
    command: str = ""
    choice: Choice = Choice()
    """Choice of attached devices."""
    most_devices: int | None = None
    """Greatest number of attached devices per SoC; None for all free devices."""
    name: str = ""
    """Name of the run."""
    purpose: Purpose = Purpose.LOCAL
    """Purpose of the run; a nightly run gives a device, between two jobs, to a person who waits for it."""
    nightly_run: str = ""
    """Id of the nightly run that this run is a part of; empty for other runs."""
    changed_since: str | None = None
    """Run to compare with: only jobs that changed since, or without a verdict there, are run; None for all."""
    shard: Shard | None = None
    """Part of the jobs to run; None for all."""
    last_failed: bool = False
    """True to run only jobs that did not pass in this user's last run of them."""
    failed_first: bool = False
    """True to run failed jobs before all others."""
    budget_s: float | None = None
    """Time limit of the run in seconds; jobs that do not fit are skipped. None for no limit."""
    toolchain: str = ""
    """Toolchain as `--toolchain` takes it; empty for the environment of farm."""
    rebuild: bool = False
    """True to compile all jobs, also cached ones."""
    confirm: bool = False
    """True to measure suspected regressions again after the run."""
    wait_s: float | None = None
    """Seconds to wait for busy or absent devices; SoCs without a device are then left out.

    None waits for busy devices as long as the run may take, and not for absent ones.
    """

    @property
    def asks_the_store(self) -> bool:
        """True if the selection of jobs depends on earlier runs."""
        return self.changed_since is not None or self.shard is not None or self.last_failed


class RunOutcome(msgspec.Struct, frozen=True):
    """Outcome of a run."""

    exit_code: int
    view: RunView
    report: Path
    """HTML file of the report."""
    confirm: bool = False
    """`RunRequest.confirm`; for a resumed run, of its first request."""
    toolchain: str = ""
    """`RunRequest.toolchain`; for a resumed run, of its first request."""
    left: bool = False
    """True for a run that continues on a shared farm without a follower."""


# Plan of a run before its first execution, as a file that every device process reads.


# Longest time without a sign of life of a device process, beside its job. It gives one whenever it waits; in between it
# moves files, executes a job (twice if the first execution ended the runner) and checks files for damage.
_SILENCE_SECONDS = 900.0
# A build takes seconds; looking 50 times a second costs nothing that can be measured.
_POLL_SECONDS = 0.02


class RunPlan(Execution, frozen=True):
    """Plan of a run: jobs in dispatch order, devices, and paths."""

    run_id: str
    folder: Path
    """Folder of the run: plan, build replies, raw results, logs."""
    cache_root: Path
    jobs: tuple[PlannedJob, ...]
    devices: tuple[Device, ...]
    runtimes: dict[str, Runtime]
    """Runtimes by the device's serial."""
    artifact_root: Path
    """Folder of files of attempts."""
    optrace: OptraceTools | None = None
    """Tools of the QNN SDK for timelines of the HTP; None except with the profiling level `optrace`."""
    health_checks: tuple[PlannedJob, ...] = ()
    """Jobs of the health check, one per SoC."""
    leased: bool = False
    """True for leased devices; False for virtual devices that the run started."""
    health: HealthConfig = HealthConfig()
    failures: FailuresConfig = FailuresConfig()

    @property
    def path(self) -> Path:
        """File of the plan."""
        return self.folder / "plan.json"

    @property
    def workers(self) -> Path:
        """Folder with a file per device, named by its number: its device process touches it as a sign of life."""
        return self.folder / "workers"

    @property
    def most_silence_s(self) -> float:
        """Seconds without a sign of life after which a device process is ended."""
        # A job runs for its requested duration without a sign of life, at most twice.
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
        """Write the plan, which device processes read."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))

    def build_log(self, key: str) -> Path:
        """Return the file of a compiler's output, by the key of the bundle."""
        return self.folder / "builds" / f"{key}.log"

    def leave_reply(self, reply: BuildReply) -> None:
        """Write the end of a build for the device processes, which wait for it. Raises OSError."""
        write_atomically(self._reply(reply.key), msgspec.json.encode(reply))

    def read_reply(self, key: str) -> BuildReply:
        """Return the end of a build. Raises FileNotFoundError before it is there."""
        return msgspec.json.decode(self._reply(key).read_bytes(), type=BuildReply)

    def is_built(self, planned: PlannedJob) -> bool:
        """Return whether the build of a job has ended."""
        return planned.cached or self._reply(planned.key).exists()

    def await_build(self, planned: PlannedJob, stop: Callable[[], bool]) -> bool:
        """Wait for the end of a build; return False when `stop` returns True before."""
        while not self.is_built(planned):
            if stop():
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _reply(self, key: str) -> Path:
        return self.folder / "builds" / f"{key}.json"


def read_plan(path: Path) -> RunPlan:
    """Return the plan in a file that `RunPlan.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RunPlan, dec_hook=from_plain)
