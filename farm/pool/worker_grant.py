"""Whether a worker may use its device now: the controller says so in a file for each, which the worker reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from farm.system.atomic import write_atomically

if TYPE_CHECKING:
    from pathlib import Path


class WorkerGrant(msgspec.Struct, frozen=True):
    """What the controller says about one device of the plan."""

    go: bool
    """A job may begin on it."""
    fence: int = 0
    """Of the lease; 0 for a device that is this run's alone, without one."""
    until_s: float | None = None
    """When the lease ends if nobody renews it, on the clock of `now_s`: a controller that is cut off from the store, or
    was stopped, cannot say so. None for no lease."""
    recover: bool = False
    """No job may begin on it before it is well again, and somebody waits for that."""
    outvoted: int = 0
    """How many jobs that failed on it have passed on another device of this run."""
    others: tuple[str, ...] = ()
    """Serials of other devices of its SoC that are ours and may try a job that failed here."""
    wanted: bool = False
    """Somebody with a better right waits for it: it is to be let go of."""

    @property
    def is_over(self) -> bool:
        """Whether the lease has ended for all that is known here."""
        return self.until_s is not None and now_s() >= self.until_s


def now_s() -> float:
    """Return the time on a clock that all processes of this machine share, and that goes on while it sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def write_grant(run_folder: Path, device: int, grant: WorkerGrant) -> None:
    """Leave a grant for the worker of a device; `device` is its number in the plan."""
    file = _file(run_folder, device)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, msgspec.json.encode(grant))


def read_grant(run_folder: Path, device: int) -> WorkerGrant:
    """Return the controller's newest grant; before there is any, no job may begin."""
    try:
        return msgspec.json.decode(_file(run_folder, device).read_bytes(), type=WorkerGrant)
    except FileNotFoundError:
        return WorkerGrant(go=False)


def _file(run_folder: Path, device: int) -> Path:
    return run_folder / "grants" / f"{device}.json"
