"""Commands on a virtual device: shells of this machine with the device's folders and none of its secrets.

Commands end as adbd's do: a closed connection ends at most one process, and its children run until the device ends or
reboots.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

from farm.base.lifeline import Lifeline
from farm.base.reaper import MARK

if TYPE_CHECKING:
    from farm.devices.virtual.tree import DeviceTree

_READ_BYTES = 256 * 1024
# In the environment of everything that runs on a device from one start of it to the next.
_LIFE = b"VIRTUAL_LIFE"
# SIGKILL takes a moment; the next look finds processes forked meanwhile.
_LOOK_SECONDS = 0.01
_MOST_LOOKS = 200


class Commands:
    """The commands of one device that have not ended, or that have left others behind."""

    def __init__(self, tree: DeviceTree) -> None:
        self._tree = tree
        self._life = _new_life()
        self._living: set[asyncio.Task[None]] = set()

    def start(self, text: bytes, *, separate_stderr: bool, terminal: str | None) -> Command:
        """Start `text` in /bin/sh, which reads commands when it is empty. `terminal` is a value for $TERM."""
        environment = {**self._tree.environment(), _LIFE: self._life}
        if MARK.encode() in os.environb:
            environment[MARK.encode()] = os.environb[MARK.encode()]
        argv = [b"/bin/sh", b"-c", self._tree.map_command(text)] if text else [b"/bin/sh"]
        command = Command(argv, self._tree.root, environment, separate_stderr=separate_stderr, terminal=terminal)
        outliving = asyncio.create_task(command.outlive())
        self._living.add(outliving)
        outliving.add_done_callback(self._living.discard)
        return command

    async def end(self) -> None:
        """Kill all of them, and all that they have started; the next ones are of another life of the device."""
        ending, self._life = self._life, _new_life()
        living = list(self._living)
        for outliving in living:
            outliving.cancel()
        await asyncio.gather(*living, return_exceptions=True)
        for _ in range(_MOST_LOOKS):
            found = _processes_of(ending)
            if not found:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK_SECONDS)


class Command:
    """Command as leader of its own session, with non-blocking streams."""

    def __init__(
        self,
        argv: list[bytes],
        folder: bytes,
        environment: dict[bytes, bytes],
        *,
        separate_stderr: bool,
        terminal: str | None,
    ) -> None:
        self.stdin, self.stdout, self.stderr = -1, -1, -1
        self._terminal = terminal is not None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lifeline = Lifeline()
        theirs: list[int] = []
        try:
            if terminal is None:
                # As adbd: a socket for input and output. What opens /dev/stdout, or asks for a pipe's size, is refused
                # there too.
                self.stdout = _open_end(socket.socketpair(), theirs)
                if separate_stderr:
                    self.stderr = _open_end(socket.socketpair(), theirs)
            else:
                environment[b"TERM"] = terminal.encode(errors="surrogateescape") or b"dumb"
                environment[b"PS1"] = b"virtual:$PWD $ "
                self.stdout, end = os.openpty()
                os.set_blocking(self.stdout, False)
                theirs.append(end)
            self.stdin = os.dup(self.stdout)
            self._process = subprocess.Popen(
                argv,
                stdin=theirs[0],
                stdout=theirs[0],
                stderr=theirs[-1],
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=(self._lifeline.child_end,),
                # Safe: this process has one thread. A terminal belongs to a session only when its leader asks.
                preexec_fn=_take_terminal if self._terminal else None,  # noqa: PLW1509
            )
        except BaseException:
            self._lifeline.cut()
            for number in {self.stdin, self.stdout, self.stderr} - {-1}:
                os.close(number)
            raise
        finally:
            for number in theirs:
                os.close(number)
        self._lifeline.tie(self._process.pid, group=True)

    async def write(self, data: memoryview) -> None:
        """Write `data` to standard input; a command that stopped reading loses it."""
        while data and self.stdin >= 0:
            try:
                data = data[os.write(self.stdin, data) :]
            except BlockingIOError:
                await _ready(self.stdin, select.POLLOUT)
            except OSError:
                return

    async def read(self, number: int) -> bytes:
        """Return the next bytes of a descriptor, empty at its end."""
        while True:
            try:
                return os.read(number, _READ_BYTES)
            except BlockingIOError:
                await _ready(number, select.POLLIN)
            except OSError:
                # Errors of a terminal without programs, and of a socket with unread data at its end.
                return b""

    async def wait(self) -> int:
        """Return the exit code as a shell has it, 128 + n for signal n."""
        return await asyncio.shield(self._ended)

    def close_stdin(self) -> None:
        """Let the command read the end of its input."""
        if self._terminal or self.stdin < 0:
            return
        number, self.stdin = self.stdin, -1
        with socket.socket(fileno=number) as ours, contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal how large its window is."""
        if self._terminal:
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def signal(self, number: int) -> None:
        """Send a signal to everything in its group, if the command itself has not ended."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def hang_up(self, *, tell: bool) -> None:
        """Close its streams; with `tell` send SIGHUP to the command alone, as adbd does for framed sessions."""
        if tell and not self._ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGHUP)
        numbers = {self.stdin, self.stdout, self.stderr} - {-1}
        self.stdin = self.stdout = self.stderr = -1
        for number in numbers:
            os.close(number)

    async def outlive(self) -> None:
        """Return when the command has ended, and all of its group. Cancelled, kill them."""
        try:
            process = os.pidfd_open(self._process.pid)
            try:
                await _ready(process, select.POLLIN)
            finally:
                os.close(process)
            self._reap()
            # A pipe without a reader reports an error.
            await _ready(self._lifeline.our_end, select.POLLIN)
        finally:
            self.signal(signal.SIGKILL)
            self._lifeline.cut()
            self._reap()

    def _reap(self) -> None:
        if not self._ended.done():
            code = self._process.wait()
            self._ended.set_result(code if code >= 0 else 128 - code)


def _open_end(pair: tuple[socket.socket, socket.socket], theirs: list[int]) -> int:
    """Return this process's end of a pair, non-blocking; the other is added to `theirs`."""
    ours, other = pair
    ours.setblocking(False)
    theirs.append(other.detach())
    return ours.detach()


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def _ready(number: int, event: int) -> None:
    """Return when a descriptor can be read (POLLIN), or written (POLLOUT)."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    writing = event == select.POLLOUT
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(number, set_ready)
    try:
        await ready
    finally:
        remove(number)


def _new_life() -> bytes:
    return secrets.token_hex(12).encode()


def _processes_of(life: bytes) -> list[int]:
    """Return the processes with `life` in their environment; ended processes have no environment."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                if _LIFE + b"=" + life in file.read():
                    found.append(int(name))
    return found
