"""The dispatcher's end of a device process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.errors import InfraError
from farm.base.logs import end_of_log
from farm.base.processes import ending
from farm.base.reaper import read_stat
from farm.dispatch.messages import End, Frames, FromDevice, ProcessEnded, ToDevice, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.fork_server import Forked, ForkServer

_READ_BYTES = 1 << 16
_CLOSE_SECONDS = 20.0
"""Time to leave its device; then the process is killed, and the next user of the device removes its files."""


class ForkedProcess:
    """A device process that a ForkServer makes."""

    def __init__(self, forks: ForkServer, log: Path) -> None:
        """The standard error of the process goes into `log`."""
        self._forks, self._log = forks, log
        self._forked: Forked | None = None
        self._answer: Callable[[FromDevice], None] = lambda _: None
        self._reader: threading.Thread | None = None
        self._writing = threading.Lock()
        self._has_exited = threading.Event()

    def start(self, answer: Callable[[FromDevice], None]) -> None:
        """Start the process; `answer` gets every message, from a thread. Raises InfraError."""
        self._answer = answer
        try:
            self._forked = self._forks.fork(self._log)
        except OSError as error:
            raise InfraError(f"a device process cannot be started: {error}") from error
        os.set_blocking(self._forked.stdin, False)
        self._reader = threading.Thread(target=self._read, args=(self._forked,), daemon=True, name="device process")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        forked = self._forked
        return forked.pid if forked is not None else 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        stat = None if self._has_exited.is_set() else read_stat(self.pid)
        return stat is not None and stat.state in {"T", "t"}

    def send(self, *messages: ToDevice) -> None:
        """Send messages in one piece. A process that is stopped, and so reads nothing, is killed."""
        data = b"".join(map(frame, messages))
        with self._writing:
            forked = self._forked
            try:
                while data and forked is not None:
                    data = data[os.write(forked.stdin, data) :]
            except BlockingIOError:
                self.kill()
            except (OSError, ValueError):
                # The process has exited: its last message follows.
                return

    def close(self) -> None:
        """Let the process leave the device and exit, wait, then kill it. No message comes afterwards."""
        self._answer = lambda _: None
        if self._reader is None:
            return
        self.send(End())
        if not self._has_exited.wait(_CLOSE_SECONDS):
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the process and everything in its session that it started. Its last message is ProcessEnded."""
        forked = self._forked
        if forked is not None and not self._has_exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)

    def _read(self, forked: Forked) -> None:
        frames: Any = Frames(FromDevice)
        reason = ""
        try:
            while data := os.read(forked.stdout, _READ_BYTES):
                for message in frames.feed(data):
                    self._answer(message)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = f"its messages could not be read: {error}"
        self.kill()
        code = self._forks.wait(forked.pid)
        self._has_exited.set()
        with self._writing:
            os.close(forked.stdin)
            self._forked = None
        os.close(forked.stdout)
        forked.lifeline.cut()
        how = reason or ("it has exited" if code is None else ending(code))
        log = end_of_log(self._log).strip()
        last = log.rpartition("\n")[2]
        self._answer(ProcessEnded(": ".join(filter(None, [how, last])), log))
