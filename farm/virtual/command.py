"""One command on a virtual device: a shell of this machine with the device's folders and none of its secrets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from typing import IO, TYPE_CHECKING

from farm.system.lifeline import Lifeline
from farm.system.reaper import MARK

if TYPE_CHECKING:
    from farm.virtual.tree import DeviceTree

_READ_BYTES = 256 * 1024


class Command:
    """One command in a process group of its own, its streams without blocking."""

    def __init__(self, text: bytes, tree: DeviceTree, *, separate_stderr: bool, terminal: str | None) -> None:
        """Start `text` in /bin/sh, which reads commands when it is empty. `terminal` is a value for $TERM."""
        environment = tree.environment()
        if MARK.encode() in os.environb:
            environment[MARK.encode()] = os.environb[MARK.encode()]
        argv = [b"/bin/sh", b"-c", tree.map_command(text)] if text else [b"/bin/sh"]
        self.stdin, self.stdout, self.stderr = -1, -1, -1
        self._terminal = terminal is not None
        self._lifeline = Lifeline()
        try:
            if terminal is None:
                self._start_on_pipes(argv, tree.root, environment, separate_stderr=separate_stderr)
            else:
                environment[b"TERM"] = terminal.encode(errors="surrogateescape") or b"dumb"
                environment[b"PS1"] = b"virtual:$PWD $ "
                self._start_on_terminal(argv, tree.root, environment)
        except BaseException:
            self._lifeline.cut()
            raise
        self._lifeline.tie(self._process.pid, group=True)

    def _start_on_pipes(
        self, argv: list[bytes], folder: bytes, environment: dict[bytes, bytes], *, separate_stderr: bool
    ) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate_stderr else subprocess.STDOUT,
            cwd=folder,
            env=environment,
            bufsize=0,
            process_group=0,
            pass_fds=(self._lifeline.child_end,),
        )
        self.stdin, self.stdout, self.stderr = map(
            _take, (self._process.stdin, self._process.stdout, self._process.stderr)
        )

    def _start_on_terminal(self, argv: list[bytes], folder: bytes, environment: dict[bytes, bytes]) -> None:
        ours, theirs = os.openpty()
        os.set_blocking(ours, False)
        self.stdin, self.stdout = os.dup(ours), ours
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=(self._lifeline.child_end,),
                # Safe: this process has one thread. A terminal belongs to a session only when its leader asks.
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            )
        finally:
            os.close(theirs)

    async def write(self, data: memoryview) -> None:
        """Give `data` to standard input; a command that does not read it any more loses it."""
        while data and self.stdin >= 0:
            try:
                data = data[os.write(self.stdin, data) :]
            except BlockingIOError:
                await _ready(self.stdin, writing=True)
            except OSError:
                return

    async def read(self, number: int) -> bytes:
        """Return what comes next from a descriptor, empty at its end."""
        while True:
            try:
                return os.read(number, _READ_BYTES)
            except BlockingIOError:
                await _ready(number)
            except OSError:
                # What a terminal says when its last program is gone.
                return b""

    async def wait(self) -> int:
        """Return the exit code as a shell has it, 128 + n for signal n."""
        process = os.pidfd_open(self._process.pid)
        try:
            await _ready(process)
        finally:
            os.close(process)
        # Not waited for yet: its number stays ours until its group is killed.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if ended is None:
            return 255
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status

    def close_stdin(self) -> None:
        """Let the command read the end of its input."""
        if self._terminal:
            return
        number, self.stdin = self.stdin, -1
        if number >= 0:
            os.close(number)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal how large its window is."""
        if self._terminal:
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def signal(self, number: int) -> None:
        """Send a signal to everything in its group, if there is anything left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Kill the command and everything in its group, and close what is open."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._lifeline.cut()
        for number in {self.stdin, self.stdout, self.stderr} - {-1}:
            os.close(number)


def _take(pipe: IO[bytes] | None) -> int:
    """Return a pipe as a descriptor that does not block, and is its only one; -1 for none."""
    if pipe is None:
        return -1
    own = os.dup(pipe.fileno())
    pipe.close()
    os.set_blocking(own, False)
    return own


async def _ready(number: int, *, writing: bool = False) -> None:
    """Return when a descriptor can be read, or written."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(number, set_ready)
    try:
        await ready
    finally:
        remove(number)
