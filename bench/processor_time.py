"""Processor time of farm itself: for many jobs while all devices are busy, and for one short command.

Farm's own processes are the command, its workers and reapers, and all other children, without adb's server and virtual
devices with their runners, which are part of a phone. For utilization.py.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_EVERY_S = 0.1
_EVERY_OF_A_SHORT_COMMAND_S = 0.01
# A search for new processes reads all of /proc, and costs more than reading the known ones.
_LOOK_EVERY = 10
NOTICED_S = _LOOK_EVERY * _EVERY_S + _EVERY_S
"""Longest time in seconds until a sampler knows a new process, with all of its processor time."""
_PR_SET_CHILD_SUBREAPER = 36
_DEVICE, _ADB, _OWN = "virtual device", "adb server", "farm"
# Programs of a virtual device, which waits for them: after their end their time is in the device's.
_PROGRAM = "program of a virtual device"


class Sampler:
    """Sampler of the processor time of this process and its descendants, as a context."""

    def __init__(self, root: int = 0, every_s: float = _EVERY_S) -> None:
        self._root, self._every_s = root or os.getpid(), every_s
        self._samples: list[tuple[float, Counter[str]]] = []
        self._last: dict[int, tuple[str, float]] = {}
        self._looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def between(self, begin: float, end: float, part: str = _OWN) -> float:
        """Return the processor seconds of a part between two moments, as `time.time()` gives them."""
        return self._at(end, part) - self._at(begin, part)

    @property
    def total(self) -> Mapping[str, float]:
        """Processor seconds by part, of processes as they were last seen."""
        return self._samples[-1][1]

    def _at(self, moment: float, part: str) -> float:
        for (early, before), (late, after) in zip(self._samples, self._samples[1:], strict=False):
            if early <= moment <= late:
                return before[part] + (after[part] - before[part]) * (moment - early) / (late - early)
        raise AssertionError("nothing was sampled then")

    def _run(self) -> None:
        while True:
            self._sample()
            if self._end.wait(self._every_s):
                self._sample()
                return

    def _sample(self) -> None:
        if self._looks % (_LOOK_EVERY if self._every_s == _EVERY_S else 1) == 0:
            self._last |= {
                process: (part, 0.0) for process, part in _descendants(self._root).items() if process not in self._last
            }
        self._looks += 1
        for process, (part, _) in self._last.items():
            known = _times(process)
            if known is not None:
                self._last[process] = part, known[1] + (known[2] if part in (_DEVICE, _PROGRAM) else 0.0)
            elif part == _PROGRAM:
                self._last[process] = part, 0.0
        found: Counter[str] = Counter()
        for part, seconds in self._last.values():
            found[_DEVICE if part == _PROGRAM else part] += seconds  # type: ignore[assignment]
        # The time of this thread belongs to the bench.
        if self._root == os.getpid():
            found[_OWN] -= time.thread_time()  # type: ignore[assignment]
        self._samples.append((time.time(), found))


def one_job(rounds: int, *checkouts: Path | None) -> list[dict[str, float]]:
    """Return the processor seconds of a warm run of one job by part, median of `rounds`, and its wall time.

    From the start of `farm run -k ... --virtual 1` to its end, when the report is written; all processes that it
    started are waited for. The farms of `checkouts`, None for this one, run alternately. Raises CalledProcessError when
    a run fails.
    """
    argv = [sys.executable, "-m", "farm.cli.main", "run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d"]
    # A user's Python writes bytecode.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    envs = [env if checkout is None else {**env, "PYTHONPATH": str(checkout)} for checkout in checkouts]
    found = [[_run(argv, one) for one in envs] for _ in range(rounds + 1)][1:]
    return [
        {name: statistics.median(one[name] for one in runs) for name in runs[0]} for runs in zip(*found, strict=True)
    ]


def _run(argv: list[str], env: dict[str, str]) -> dict[str, float]:
    # A process that outlives its parent, as the reaper does, is waited for as well.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [*argv, "--virtual", "1"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with Sampler(process.pid, _EVERY_OF_A_SHORT_COMMAND_S) as sampler:
        output, _ = process.communicate()
    wall_s = time.perf_counter() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, output)
    _wait_for_children()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    others = {part: sampler.total.get(part, 0.0) for part in (_DEVICE, _ADB)}
    return {_OWN: all_s - sum(others.values()), **others, "wall": wall_s}


def _wait_for_children() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _descendants(root: int) -> dict[int, str]:
    """Return the part that `root` and each process below it belong to."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        known = _times(int(path.name))
        if known is not None:
            children.setdefault(known[0], []).append(int(path.name))
    parts, waiting = {root: _OWN}, [root]
    while waiting:
        process = waiting.pop()
        for child in children.get(process, ()):
            above = parts[process]
            parts[child] = _part(child) if above == _OWN else _PROGRAM if above == _DEVICE else above
            waiting.append(child)
    return parts


def _times(process: int) -> tuple[int, float, float] | None:
    """Return the parent of a process, its processor seconds, and its waited-for children's."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    own, waited = (sum(map(int, fields[n : n + 2])) * _TICK_S for n in (11, 13))
    return int(fields[1]), own, waited


def _part(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return _OWN
    # Checkouts of before 28 November 2026 have another package.
    if b"farm.devices.virtual" in words or b"farm.virtual" in words:
        return _DEVICE
    return _ADB if words[0].endswith(b"adb") else _OWN
