"""Commands on a virtual device, and adb's services `shell` and `exec` that carry their streams."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

from farm.base.reaper import MARK, Lifeline
from farm.devices.adb.protocol import CLOSE_STDIN, EXIT, FRAME, STDERR, STDIN, STDOUT, WINDOW_SIZE, take_frames
from farm.devices.virtual.faults import CONDITIONS, LINK_KINDS, Fault, FaultKind
from farm.devices.virtual.streams import Stream, StreamClosedError, cancelled

if TYPE_CHECKING:
    from farm.devices.virtual.injection import Injection
    from farm.devices.virtual.tree import DeviceTree


# Commands on a virtual device: shells of this machine with the device's folders and none of its secrets.
#
# Commands end as adbd's do: a closed connection ends at most one process, and its children run until the device ends
# or reboots.


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
        await cancelled(self._living)
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


# adb's services `shell` and `exec`: a command's streams, as they are or in frames of shell protocol v2.


# `adb exec-in` hangs up when it has sent everything: how long the command may take to read it.
_DRAIN_SECONDS = 5.0

# Option of a runner in a session, and a key of its answers: docs/reference/native_runner.md.
_SESSION = re.compile(r"(?<![\w-])--serve(?![\w-])")
_ANSWER = b'"job"'

_ENDLESS_BYTES = 64 * 1024


async def serve_shell(stream: Stream, commands: Commands, faults: Injection, service: str) -> None:
    """Run `shell[,v2][,TERM=...][,pty|,raw]:COMMAND` or `exec:COMMAND` until it ends or the host hangs up.

    Then it gets SIGHUP where frames are spoken, else only the end of its streams, as from adbd: shell_service.cpp of
    AOSP's packages/modules/adb.
    """
    head, _, text = service.partition(":")
    kind, *options = head.split(",")
    framed = "v2" in options
    fault = faults.strike("shell", text) if faults.armed else None
    if fault is not None and (fault.kind in LINK_KINDS or fault.kind in CONDITIONS):
        await faults.hit(fault)
        fault = None
    wants_terminal = "pty" in options or (kind == "shell" and not text and "raw" not in options)
    terminal = next((option.removeprefix("TERM=") for option in options if option.startswith("TERM=")), "")
    command = commands.start(
        text.encode(errors="surrogateescape"),
        separate_stderr=framed,
        terminal=terminal if wants_terminal else None,
    )
    output = _CommandOutput(command, faults, text, fault)
    session = _FramedSession(stream, command, output) if framed else _PlainSession(stream, command, output)
    tasks = [
        asyncio.create_task(session.pump_output()),
        asyncio.create_task(session.feed_input()),
        asyncio.create_task(stream.wait_closed()),
    ]
    pump, feeder, closed = tasks
    try:
        await asyncio.wait((pump, closed), return_when=asyncio.FIRST_COMPLETED)
        if closed.done() and not framed:
            with contextlib.suppress(TimeoutError, StreamClosedError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await feeder
    finally:
        await cancelled(tasks)
        command.hang_up(tell=framed)


class _PlainSession:
    """Both outputs on the stream as they come, everything from the stream to standard input."""

    def __init__(self, stream: Stream, command: Command, output: _CommandOutput) -> None:
        self._stream, self._command, self._output = stream, command, output

    async def pump_output(self) -> None:
        while data := await self._output.read(self._command.stdout):
            await self._stream.write(data)

    async def feed_input(self) -> None:
        while (data := await self._stream.read()) is not None:
            await self._command.write(memoryview(data))
        self._command.close_stdin()


class _FramedSession:
    """Session of frames with their stream's number, and a last frame with the exit code."""

    def __init__(self, stream: Stream, command: Command, output: _CommandOutput) -> None:
        self._stream, self._command, self._output = stream, command, output
        # Output between two acknowledgements travels in one packet, as with adbd.
        self._frames = bytearray()
        self._sending = asyncio.Lock()

    async def pump_output(self) -> None:
        # A task group, because a pump that outlives the other would use a descriptor that was closed and reused.
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(self._pump(self._command.stdout, STDOUT))
            if self._command.stderr >= 0:
                pumps.create_task(self._pump(self._command.stderr, STDERR))
        code = await self._output.wait()
        if words := self._output.last_words():
            await self._write(STDERR, words)
        await self._write(EXIT, bytes([code & 0xFF]))

    async def feed_input(self) -> None:
        received = bytearray()
        while (data := await self._stream.read()) is not None:
            received += data
            for kind, payload in take_frames(received):
                await self._take(kind, payload)

    async def _take(self, kind: int, payload: bytes) -> None:
        if kind == STDIN:
            await self._command.write(memoryview(payload))
        elif kind == CLOSE_STDIN:
            self._command.close_stdin()
        elif kind == WINDOW_SIZE:
            # "24x80,0x0": rows and columns, then pixels.
            rows, _, columns = payload.partition(b",")[0].partition(b"x")
            if rows.isdigit() and columns.isdigit():
                self._command.resize(int(rows) & 0xFFFF, int(columns) & 0xFFFF)

    async def _pump(self, number: int, kind: int) -> None:
        while data := await self._output.read(number):
            await self._write(kind, data)

    async def _write(self, kind: int, data: bytes) -> None:
        """Return when `data` is on its way, with what others wrote while it waited."""
        self._frames += FRAME.pack(kind, len(data)) + data
        async with self._sending:
            await self._stream.wait_writable()
            if self._frames:
                frames, self._frames = self._frames, bytearray()
                await self._stream.write(frames)


class _CommandOutput:
    """The outputs of one command."""

    def __init__(self, command: Command, faults: Injection, text: str, fault: Fault | None) -> None:
        """Take the shell's `text` and the `fault` that strikes the command as a whole."""
        self._command, self._faults, self._text = command, faults, text
        self._is_session = _SESSION.search(text) is not None
        self._fault = fault
        self._left = fault.after_bytes if fault is not None else 0

    async def read(self, number: int) -> bytes:
        """Return the next bytes of a descriptor, empty at its end. Raises StreamClosedError to close the stream."""
        is_stdout = number == self._command.stdout
        if is_stdout and self._has(FaultKind.ENDLESS_OUTPUT):
            return self._repeated()
        if self._has(FaultKind.PARTIAL_OUTPUT):
            return await self._part(number)
        data = await self._command.read(number)
        if is_stdout and self._is_session and self._faults.armed and _ANSWER in data:
            return await self._answer(data)
        return data

    async def wait(self) -> int:
        """Return the exit code. Raises StreamClosedError to hang up instead."""
        code = await self._command.wait()
        if self._has(FaultKind.PARTIAL_OUTPUT):
            raise StreamClosedError
        if self._fault is not None and self._has(FaultKind.EXIT_CODE):
            return self._fault.code or 1
        return code

    def last_words(self) -> bytes:
        """Return the fault's text for standard error before the end."""
        return self._fault.text.encode() if self._fault is not None and self._has(FaultKind.EXIT_CODE) else b""

    def _has(self, kind: FaultKind) -> bool:
        return self._fault is not None and self._fault.kind == kind

    def _repeated(self) -> bytes:
        text = (self._fault.text if self._fault is not None else "").encode() or b"y\n"
        return text * max(1, _ENDLESS_BYTES // len(text))

    async def _part(self, number: int) -> bytes:
        if not self._left:
            raise StreamClosedError
        data = (await self._command.read(number))[: self._left]
        self._left -= len(data)
        return data

    async def _answer(self, data: bytes) -> bytes:
        """Return what reaches the host of a runner's answer to a job."""
        fault = self._faults.strike("answer", self._text)
        if fault is None:
            return data
        kind = FaultKind(fault.kind)
        if kind in LINK_KINDS or kind in CONDITIONS:
            await self._faults.hit(fault)
            return data
        if kind is FaultKind.WRONG_NUMBERS:
            self._faults.spoil_outputs(fault.after_bytes)
            return data
        if kind is FaultKind.HANG_RUNNER:
            self._command.signal(signal.SIGSTOP)
            await asyncio.Event().wait()
        self._fault = fault
        start = data.rfind(b"\n", 0, data.index(_ANSWER)) + 1
        before, answer = data[:start], data[start:]
        if kind is FaultKind.PARTIAL_OUTPUT:
            # At most half of the answer, so that it is never complete.
            self._left = 0
            before += answer[: min(fault.after_bytes, len(answer) // 2)]
        elif kind in (FaultKind.KILL_RUNNER, FaultKind.EXIT_CODE):
            self._command.signal(fault.code if fault.code and kind is FaultKind.KILL_RUNNER else signal.SIGKILL)
        return before or await self.read(self._command.stdout)
