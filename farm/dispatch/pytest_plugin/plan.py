"""Plan of one `farm pytest`: a file that all processes of the user's pytest read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from farm.base.atomic import write_atomically
from farm.base.config.settings import HealthConfig, LeaseConfig
from farm.base.text import one_line
from farm.builds.compile.pool import MemoryLimits
from farm.builds.runtime.runtime import Runtime
from farm.builds.toolchains.toolchain import Compiler
from farm.devices.connect import from_plain
from farm.devices.device import Device
from farm.store.records import RunRecord

STORE_VARIABLE = "FARM_STORE"
"""Environment variable with the URL of the store, which may hold a password and so is in no file."""

PLAN_VARIABLE = "FARM_PYTEST_PLAN"
"""Environment variable that says where the plan is."""

_RUN, _INTERRUPTED, _LEFT, _FILES, _NOTES = "run", "interrupted", "left-", "files", "notes"


GIVEN_UP = "farm_given_up"
"""Attribute of a report whose worker has no device any more."""


class SuitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One `farm pytest`: devices, and where things are."""

    token: str
    """Names what this command leaves on devices."""
    folder: Path
    """Folder of this command alone: scratch folders of the workers, and their messages."""
    soc: str
    backend: str
    devices: tuple[Device, ...]
    workers: int
    """Devices that could be had when the tests began: so many workers at most."""
    runtimes: dict[str, Runtime]
    """By the device's serial."""
    leased: bool
    """Others may use the devices as well; otherwise they are this command's own."""
    leases: str = ""
    """URL of the store with the leases of the command's own devices."""
    lease_times: LeaseConfig = LeaseConfig()
    purpose: str = ""
    """Purpose of the leases, for other users."""
    record: RunRecord
    """What the run is, once there is a test."""
    cache_root: Path
    suite_folders: tuple[Path, ...]
    versions: dict[str, str]
    """Of the compiler, as in `farm.builds.bundles.key`."""
    compiler: Compiler
    """How a builder process is started."""
    build_timeout_s: float
    build_limits: MemoryLimits
    health: HealthConfig = HealthConfig()

    @property
    def path(self) -> Path:
        """The file it is kept in."""
        return self.folder / "plan.json"

    @property
    def lease_store(self) -> str:
        """The URL of the store with the leases of the devices."""
        return self.leases or os.environ[STORE_VARIABLE]

    @property
    def run_id(self) -> str:
        """The id of the run; empty as long as no test was collected."""
        try:
            return (self.folder / _RUN).read_text()
        except FileNotFoundError:
            return ""

    def leave_run(self, run_id: str) -> None:
        """Tell the command which run it has become."""
        (self.folder / _RUN).write_text(run_id)

    @property
    def was_interrupted(self) -> bool:
        """Whether pytest was, by Ctrl-C or `pytest.exit`."""
        return (self.folder / _INTERRUPTED).exists()

    def leave_interrupted(self) -> None:
        """Tell the command that pytest was interrupted."""
        (self.folder / _INTERRUPTED).touch()

    def leave_device(self, number: int, reason: str) -> None:
        """Tell the command that a worker has let go of its device for good."""
        write_atomically(self.folder / f"{_LEFT}{number}", reason)

    def devices_left(self) -> dict[int, str]:
        """Return the devices that workers have let go of for good, by number, and why."""
        left = self.folder.glob(f"{_LEFT}*")
        return {int(path.name.removeprefix(_LEFT)): path.read_text() for path in left if not path.suffix}

    def leave_note(self, text: str) -> None:
        """Have the command print a line: pytest captures the output of a worker while a test runs."""
        with (self.folder / _NOTES).open("a") as file:
            file.write(f"{one_line(text)}\n")

    def notes(self) -> list[str]:
        """Return the lines so far."""
        try:
            return (self.folder / _NOTES).read_text().splitlines()
        except FileNotFoundError:
            return []

    def leave_files(self, files: dict[str, str]) -> None:
        """Tell where tests are: paths by the beginning of their node ids, which is empty for those outside the root."""
        write_atomically(self.folder / _FILES, msgspec.json.encode(files))

    def files(self) -> dict[str, str]:
        """Return what `leave_files` told last."""
        try:
            return msgspec.json.decode((self.folder / _FILES).read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def write(self) -> None:
        """Write it for the processes to come."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))


def read_plan() -> SuitePlan | None:
    """Return the plan of the `farm pytest` that started this process, None where that was something else."""
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return None
    return msgspec.json.decode(Path(path).read_bytes(), type=SuitePlan, dec_hook=from_plain)
