"""The agent's end of a slot that is a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from farm.cluster.slots.slot_protocol import Died, End, Frames, FromSlot, SlotTimes, frame
from farm.system.processes import ending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.cluster.slots.slot_protocol import ToSlot
    from farm.system.processes import Child, Supervisor

_READ_BYTES = 1 << 16

# A slot needs neither the store nor that of artifacts.
SECRETS = frozenset({"FARM_STORE", "PGPASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
"""Variables that let their process into the store and to its files: code of developers gets none of them."""


class SlotProcess:
    """A `farm.cluster.slots.slot` that this process started."""

    def __init__(self, supervisor: Supervisor, name: str, log: Path, times: SlotTimes = SlotTimes()) -> None:  # noqa: B008 - frozen
        """`name` is for people; what the process prints goes into `log`."""
        self._supervisor, self._name, self._log, self._times = supervisor, name, log, times
        self._child: Child | None = None
        self._answer: Callable[[FromSlot], None] = lambda _: None
        self._reader: threading.Thread | None = None
        self._writing = threading.Lock()

    def start(self, answer: Callable[[FromSlot], None]) -> None:
        """Start the process; `answer` gets every message, from a thread. Raises InfraError."""
        self._answer = answer
        argv = [sys.executable, "-m", "farm.cluster.slots.slot"]
        # Dozens of slots share the processors, and no matrix here is worth threads.
        env = {name: value for name, value in os.environ.items() if name not in SECRETS}
        env["OPENBLAS_NUM_THREADS"] = "1"
        self._child = self._supervisor.spawn(
            argv, name=self._name, env=env, stdin_pipe=True, stdout_pipe=True, stderr=self._log
        )
        if self._child.process.stdin is not None:
            os.set_blocking(self._child.process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True, name=self._name)
        self._reader.start()

    def send(self, *messages: ToSlot) -> None:
        """Send messages in one piece. A process that reads nothing any more, as it is stopped, is ended."""
        pipe = self._child.process.stdin if self._child is not None else None
        if pipe is None:
            return
        data = b"".join(map(frame, messages))
        with self._writing:
            try:
                while data:
                    data = data[os.write(pipe.fileno(), data) :]
            except BlockingIOError:
                self.kill()
            except (OSError, ValueError):
                # It has ended: its last message says so.
                return

    def close(self) -> None:
        """Let it leave the device and end, and wait for that; then it is killed."""
        child, self._answer = self._child, lambda _: None
        if child is None:
            return
        self.send(End())
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(self._times.close_s)
        child.terminate()

    def kill(self) -> None:
        """End it at once."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)

    def _read(self, child: Child) -> None:
        frames: Any = Frames(FromSlot)
        pipe = child.process.stdout
        reason = ""
        try:
            while pipe is not None and (data := os.read(pipe.fileno(), _READ_BYTES)):
                for message in frames.feed(data):
                    self._answer(message)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = f"its messages could not be read: {error}"
            self.kill()
        code = child.terminate()
        last = child.log_tail().strip().rpartition("\n")[2]
        self._answer(Died(": ".join(filter(None, [reason or ending(code), last]))))
