"""Whether a worker may use its device now: the controller says so in a file for each, which the worker reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Permit(msgspec.Struct, frozen=True):
    """What the controller says about one device of the plan."""

    go: bool
    """A job may begin on it."""
    fence: int = 0
    """Of the lease; 0 for a device that is this run's alone, without one."""
    until_s: float | None = None
    """When the lease ends if nobody renews it, on the clock of `now_s`: a controller that is cut off from the store, or
    was stopped, cannot say so. None for no lease."""
    mend: bool = False
    """No job may begin on it before it is well again, and somebody waits for that."""
    outvoted: int = 0
    """How many jobs that failed on it have passed on another device of this run."""
    others: tuple[str, ...] = ()
    """Serials of other devices of its SoC that are ours and may try a job that failed here."""

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended for all that is known here."""
        return self.until_s is not None and now_s() >= self.until_s


def now_s() -> float:
    """Return the time on a clock that all processes of this machine share, and that goes on while it sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def leave_permit(run_folder: Path, device: int, permit: Permit) -> None:
    """Tell the worker of a device; `device` is its number in the plan."""
    file = _file(run_folder, device)
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(permit))
    part.rename(file)


def read_permit(run_folder: Path, device: int) -> Permit:
    """Return what the controller said last; before it said anything, no job may begin."""
    try:
        return msgspec.json.decode(_file(run_folder, device).read_bytes(), type=Permit)
    except FileNotFoundError:
        return Permit(go=False)


def _file(run_folder: Path, device: int) -> Path:
    return run_folder / "permits" / f"{device}.json"
