"""Progress of a run, the longest allowed wait, and the evidence of a hang. For chaos.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from chaos_databases import Disturbed
from chaos_home import Home, processes_of

from farm.devices.recovery import STEP_SECONDS

_SLACK_S = 15.0
LONGEST_WAIT_S = sum(STEP_SECONDS.values()) + _SLACK_S
"""Seconds that a run may be without an attempt, an event or a new word between two acts. Among the waits in
docs/explanation/health.md the recovery of a device is the longest here: stopped, filled or killed parts are back
by then, jobs take two seconds (chaos_home.py), and nothing stops a worker."""
_POLL_S = 0.25
_COUNT_EVERY_S = 1.0
_STACKS_S = 1.0


class Watch:
    """Notices that a run stands still."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, store: Disturbed) -> None:
        self._process, self._output, self._store = process, output, store
        self._last: object = None
        self._counts: object = None
        self._counted_at = 0.0
        self._since = time.monotonic()
        self.longest_s = 0.0
        """Without progress, while nothing happened to it."""

    def wait(self, bound_s: float, tend: Callable[[], bool]) -> bool:
        """Return True once the run has ended, False when it stood still for `bound_s`.

        `tend` is called all the time, and returns whether anything happens to the run.
        """
        while self._process.poll() is None:
            tormented = tend()
            now = time.monotonic()
            if tormented or self._moved():
                self._since = now
            still_s = now - self._since
            self.longest_s = max(self.longest_s, still_s)
            if still_s > bound_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _moved(self) -> bool:
        if time.monotonic() > self._counted_at + _COUNT_EVERY_S:
            # A store that does not answer keeps the last counts.
            self._counts = self._store.counts() or self._counts
            self._counted_at = time.monotonic()
        # The same complaint over and over is no progress.
        now = (len(set(self._output.read_bytes().splitlines())), self._counts)
        moved = now != self._last
        self._last = now
        return moved


def dump(home: Home, output: Path, acts: Path, into: Path) -> None:
    """Keep the evidence of a hang: stacks, kernel wait channels, grants, logs, and the store."""
    into.mkdir(parents=True)
    lines = []
    for one in processes_of(home.folder):
        proc = Path("/proc", str(one.pid))
        facts = []
        for name in ("wchan", "status", "stack"):
            with contextlib.suppress(OSError):
                text = (proc / name).read_text()
                facts.append("\n".join(text.splitlines()[:9]) if name == "status" else text)
        lines += [f"== {one.pid} {one.role}: {one.command}", *facts, ""]
        if one.role in ("controller", "worker", "builder"):
            with contextlib.suppress(OSError):
                os.kill(one.pid, signal.SIGUSR1)
    (into / "processes.txt").write_text("\n".join(lines))
    time.sleep(_STACKS_S)
    for name in (output, acts, home.stacks, home.state, home.cwd, *home.storage.rglob("*.log")):
        with contextlib.suppress(OSError, shutil.Error):
            copy = shutil.copytree if name.is_dir() else shutil.copy
            copy(name, into / name.name)  # type: ignore[operator]
