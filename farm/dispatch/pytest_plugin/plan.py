"""Plan of one `farm pytest`: a file that all processes of the user's pytest read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from farm.base.config.settings import HealthConfig, LeaseConfig
from farm.base.files import write_atomically
from farm.base.text import one_line
from farm.builds.compile.pool import MemoryLimits
from farm.builds.runtime.runtime import Runtime
from farm.builds.toolchains.toolchain import Compiler
from farm.devices.connect import from_plain
from farm.devices.device import Device
from farm.store.records import RunRecord

STORE_VARIABLE = "FARM_STORE"
"""Environment variable with the URL of the store, which may contain a password and therefore is in no file."""

PLAN_VARIABLE = "FARM_PYTEST_PLAN"
"""Environment variable with the path of the plan."""

_RUN, _INTERRUPTED, _LEFT, _FILES, _NOTES = "run", "interrupted", "left-", "files", "notes"


GIVEN_UP = "farm_given_up"
"""Attribute of a report whose worker has lost its last device."""


class SuitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a `farm pytest`: devices, folders and settings."""

    token: str
    """Part of the names of this command's files on devices."""
    folder: Path
    """Folder of this command alone: scratch folders of the workers, and their messages."""
    soc: str
    backend: str
    devices: tuple[Device, ...]
    workers: int
    """Most workers: the number of free devices at the start, at least 1."""
    runtimes: dict[str, Runtime]
    """Runtimes by the serial of their device."""
    leased: bool
    """True for devices that are shared with other users; False for the command's own devices."""
    leases: str = ""
    """URL of the store with the leases of the command's own devices."""
    lease_times: LeaseConfig = LeaseConfig()
    purpose: str = ""
    """Purpose of the leases, for other users."""
    record: RunRecord
    """Record of the run, which is stored with the first test."""
    cache_root: Path
    suite_folders: tuple[Path, ...]
    versions: dict[str, str]
    """Versions of the compiler, as in `farm.builds.bundles.key`."""
    compiler: Compiler
    """Interpreter and environment of builder processes."""
    build_timeout_s: float
    build_limits: MemoryLimits
    health: HealthConfig = HealthConfig()
    upstream: dict[str, str | int | bool] = {}
    """Values for upstream's TestQNN."""

    @property
    def path(self) -> Path:
        """File of the plan."""
        return self.folder / "plan.json"

    @property
    def lease_store(self) -> str:
        """URL of the store with the leases of the devices."""
        return self.leases or os.environ[STORE_VARIABLE]

    @property
    def run_id(self) -> str:
        """Id of the run; empty before the first test is collected."""
        return self._text(_RUN)

    def leave_run(self, run_id: str) -> None:
        """Write the id of the run, for the command."""
        (self.folder / _RUN).write_text(run_id)

    @property
    def was_interrupted(self) -> bool:
        """True if pytest was interrupted, by Ctrl-C or `pytest.exit`."""
        return (self.folder / _INTERRUPTED).exists()

    def leave_interrupted(self) -> None:
        """Mark pytest as interrupted, for the command."""
        (self.folder / _INTERRUPTED).touch()

    def leave_device(self, device: Device, reason: str) -> None:
        """Mark a device as given up by its worker for good, for the command."""
        write_atomically(self.folder / f"{_LEFT}{self.devices.index(device)}", reason)

    def devices_left(self) -> dict[str, str]:
        """Return the reasons of devices that workers have given up for good, by their ids."""
        left = {device.id: self._text(f"{_LEFT}{number}") for number, device in enumerate(self.devices)}
        return {id_: reason for id_, reason in left.items() if reason}

    def leave_note(self, text: str) -> None:
        """Have the command print a line: pytest captures the output of a worker while a test runs."""
        with (self.folder / _NOTES).open("a", encoding="utf-8") as file:
            file.write(f"{one_line(text)}\n")

    def notes(self) -> list[str]:
        """Return the lines of `leave_note` so far."""
        return self._text(_NOTES).splitlines()

    def leave_files(self, files: dict[str, str]) -> None:
        """Write the paths of test files, by the beginning of their node ids (empty for files outside the root)."""
        write_atomically(self.folder / _FILES, msgspec.json.encode(files))

    def files(self) -> dict[str, str]:
        """Return the paths of the last `leave_files`."""
        return msgspec.json.decode(self._text(_FILES) or "{}", type=dict[str, str])

    def _text(self, name: str) -> str:
        """Return the text of a file of the command; empty before it is there."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write(self) -> None:
        """Write the plan for the processes of pytest."""
        self.path.write_bytes(msgspec.json.encode(self, enc_hook=str))


def read_plan() -> SuitePlan | None:
    """Return the plan of the `farm pytest` that started this process; None in any other process."""
    path = os.environ.get(PLAN_VARIABLE)
    if not path:
        return None
    return msgspec.json.decode(Path(path).read_bytes(), type=SuitePlan, dec_hook=from_plain)
