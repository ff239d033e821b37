"""The host's end of adb's shell protocol v2: standard streams and the exit code over one stream.

A frame is one byte that says what it is, a little-endian u32 and so many bytes. Source: shell_protocol.h of AOSP's
packages/modules/adb.
"""

from __future__ import annotations

import select
import struct
import time
from typing import TYPE_CHECKING

from farm.devices.transport import Completed
from farm.errors import DeviceError, DeviceTimeoutError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

_FRAME = struct.Struct("<BI")
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)
# adb's largest payload; a device that announces more does not speak this protocol.
_FRAME_BYTES = 1 << 20
_STDIN_CHUNK = 64 * 1024
_READ_BYTES = 256 * 1024


class ShellCall:
    """One program on a device, from its start to its exit code. The stream belongs to the caller."""

    def __init__(self, stream: socket.socket, serial: str, argv: Sequence[str], stdin: bytes, max_output: int) -> None:
        self._stream, self._serial, self._argv, self._max_output = stream, serial, argv, max_output
        self._sending = memoryview(_stdin_frames(stdin))
        self._received = bytearray()
        self._output: dict[int, list[bytes]] = {_STDOUT: [], _STDERR: []}
        self._size = 0
        self._code: int | None = None

    def communicate(self, timeout_s: float) -> Completed:
        """Send standard input, take in the output and return the result. Raises DeviceError."""
        started = time.monotonic()
        self._stream.setblocking(False)
        poll = select.poll()
        poll.register(self._stream, select.POLLIN | select.POLLOUT)
        while self._code is None:
            left = timeout_s - (time.monotonic() - started)
            events = poll.poll(max(0.0, left) * 1000)
            if left <= 0:
                raise DeviceTimeoutError(
                    self._serial,
                    f"did not finish in {timeout_s:g} s and was ended",
                    argv=self._argv,
                    stderr=self._tail(),
                )
            for _, event in events:
                if event & select.POLLOUT and not self._send():
                    poll.modify(self._stream, select.POLLIN)
                if event & ~select.POLLOUT:
                    self._receive()
        stdout, stderr = (b"".join(self._output[kind]) for kind in (_STDOUT, _STDERR))
        return Completed(self._code, stdout, stderr, time.monotonic() - started)

    def _send(self) -> bool:
        """Send what the stream takes; return whether something is left."""
        try:
            self._sending = self._sending[self._stream.send(self._sending) :]
        except BlockingIOError:
            return True
        except OSError:
            # The program ended without reading everything: its exit code is on the way, or the end of the stream.
            self._sending = self._sending[:0]
        return bool(self._sending)

    def _receive(self) -> None:
        try:
            data = self._stream.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._error(f"the connection broke: {error.strerror}") from None
        if not data:
            raise self._error("the connection ended before the program did")
        self._received += data
        position = 0
        while len(self._received) - position >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._received, position)
            if size > _FRAME_BYTES:
                raise self._error(f"announced a frame of {size} bytes: it does not speak adb's shell protocol v2")
            start = position + _FRAME.size
            if len(self._received) < start + size:
                break
            self._take(kind, bytes(memoryview(self._received)[start : start + size]))
            position = start + size
        del self._received[:position]

    def _take(self, kind: int, payload: bytes) -> None:
        if kind in self._output:
            self._size += len(payload)
            if self._size > self._max_output:
                raise self._error(f"wrote more than {self._max_output} bytes and was ended")
            self._output[kind].append(payload)
        elif kind == _EXIT and payload:
            self._code = payload[0]

    def _tail(self) -> str:
        return b"".join(self._output[_STDERR][-4:])[-400:].decode(errors="replace")

    def _error(self, problem: str) -> DeviceError:
        return DeviceError(self._serial, problem, argv=self._argv, stderr=self._tail())


def _stdin_frames(data: bytes) -> bytes:
    pieces = []
    for start in range(0, len(data), _STDIN_CHUNK):
        chunk = data[start : start + _STDIN_CHUNK]
        pieces += [_FRAME.pack(_STDIN, len(chunk)), chunk]
    return b"".join([*pieces, _FRAME.pack(_CLOSE_STDIN, 0)])
