"""Record of the jobs on stub devices with their times, in files that are independent of stores, leases and fences.

A stub slot holds a lock of its device's file as long as it runs a job, which the kernel releases when its process dies,
and appends a line when a job begins and when it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
