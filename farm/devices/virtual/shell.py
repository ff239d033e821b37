"""adb's services `shell` and `exec`: a command's streams, as they are or in frames of shell protocol v2."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import struct
import time
from typing import TYPE_CHECKING

from farm.devices.virtual.faults import CONDITIONS, LINK_KINDS, Fault, FaultKind
from farm.devices.virtual.streams import Stream, StreamClosedError
from farm.devices.virtual.wire import MAX_PAYLOAD, ProtocolError

if TYPE_CHECKING:
    from farm.devices.virtual.command import Command, Commands
    from farm.devices.virtual.injection import Injection

# Frame of shell protocol v2, shell_protocol.h of AOSP's packages/modules/adb: a byte for the kind, and a length.
_FRAME = struct.Struct("<BI")
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN, _WINDOW_SIZE = range(6)

# `adb exec-in` hangs up when it has sent everything: how long the command may take to read it.
_DRAIN_SECONDS = 5.0

# Option of a runner in a session, and a key of its answers: docs/reference/native_runner.md.
_SESSION = re.compile(r"(?<![\w-])--serve(?![\w-])")
_ANSWER = b'"job"'

_ENDLESS_BYTES = 64 * 1024
# Uneven times: a runner stands still and runs in turns.
_STILL_SECONDS, _RUNNING_SECONDS = 0.002, 0.0003


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
    if _SESSION.search(text):
        faults.begin_runner()
        if faults.uneven:
            tasks.append(asyncio.create_task(_interrupt(command)))
    try:
        await asyncio.wait((pump, closed), return_when=asyncio.FIRST_COMPLETED)
        if closed.done() and not framed:
            with contextlib.suppress(TimeoutError, StreamClosedError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await feeder
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        command.hang_up(tell=framed)


async def _interrupt(command: Command) -> None:
    """Stop a command and let it continue, again and again, until this task is cancelled."""
    try:
        while True:
            command.signal(signal.SIGSTOP)
            await asyncio.sleep(_STILL_SECONDS)
            command.signal(signal.SIGCONT)
            # The loop's own timer is coarser than an inference.
            time.sleep(_RUNNING_SECONDS)
    finally:
        command.signal(signal.SIGCONT)


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
            pumps.create_task(self._pump(self._command.stdout, _STDOUT))
            if self._command.stderr >= 0:
                pumps.create_task(self._pump(self._command.stderr, _STDERR))
        code = await self._output.wait()
        if words := self._output.last_words():
            await self._write(_STDERR, words)
        await self._write(_EXIT, bytes([code & 0xFF]))

    async def feed_input(self) -> None:
        received = bytearray()
        while (data := await self._stream.read()) is not None:
            received += data
            while len(received) >= _FRAME.size:
                kind, size = _FRAME.unpack_from(received)
                if size > MAX_PAYLOAD:
                    raise ProtocolError("a frame larger than a packet")
                end = _FRAME.size + size
                if len(received) < end:
                    break
                payload = bytes(received[_FRAME.size : end])
                del received[:end]
                await self._take(kind, payload)

    async def _take(self, kind: int, payload: bytes) -> None:
        if kind == _STDIN:
            await self._command.write(memoryview(payload))
        elif kind == _CLOSE_STDIN:
            self._command.close_stdin()
        elif kind == _WINDOW_SIZE:
            # "24x80,0x0": rows and columns, then pixels.
            rows, _, columns = payload.partition(b",")[0].partition(b"x")
            if rows.isdigit() and columns.isdigit():
                self._command.resize(int(rows) & 0xFFFF, int(columns) & 0xFFFF)

    async def _pump(self, number: int, kind: int) -> None:
        while data := await self._output.read(number):
            await self._write(kind, data)

    async def _write(self, kind: int, data: bytes) -> None:
        """Return when `data` is on its way, with what others wrote while it waited."""
        self._frames += _FRAME.pack(kind, len(data)) + data
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
