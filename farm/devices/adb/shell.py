"""The host's end of adb's shell protocol v2: standard streams and the exit code over one stream.

A frame is one byte for its kind, a little-endian u32 for its length, and its bytes. Source: shell_protocol.h of AOSP's
packages/modules/adb.
"""

from __future__ import annotations

import select
import struct
import time
from typing import TYPE_CHECKING

from farm.base.errors import DeviceError
from farm.devices.adb.host import AdbHost, acknowledge
from farm.devices.transport import TAIL_BYTES, Output, Process

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

_FRAME = struct.Struct("<BI")
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)
# adb's largest payload; a device that announces more does not speak this protocol.
_FRAME_BYTES = 1 << 20
_STDIN_CHUNK = 64 * 1024
_READ_BYTES = 256 * 1024


class ShellProcess(Process):
    """Program on a device, from its start to its exit code: see Process. Owns the stream."""

    def __init__(
        self,
        stream: socket.socket,
        host: AdbHost,
        serial: str,
        argv: Sequence[str],
        end: Callable[[], None] | None = None,
    ) -> None:
        """Take `end`, which ends the program and its children on the device after an early close."""
        super().__init__()
        self._stream, self._host, self._serial, self._argv, self._end = stream, host, serial, argv, end
        stream.setblocking(False)
        self._poll = select.poll()
        self._received = bytearray()
        self._tail = b""

    def send(self, data: bytes) -> None:
        """See Process."""
        pieces = [data[start : start + _STDIN_CHUNK] for start in range(0, len(data), _STDIN_CHUNK)]
        super().send(b"".join(_FRAME.pack(_STDIN, len(piece)) + piece for piece in pieces))

    def close_stdin(self) -> None:
        """See Process."""
        super().send(_FRAME.pack(_CLOSE_STDIN, 0))

    def receive(self, timeout_s: float) -> Output:
        """See Process."""
        output: dict[int, list[bytes]] = {_STDOUT: [], _STDERR: []}
        deadline = time.monotonic() + timeout_s
        while self._code is None and not any(output.values()):
            self._poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._sending else 0))
            left = deadline - time.monotonic()
            events = self._poll.poll(max(0.0, left) * 1000)
            for _, event in events:
                if event & select.POLLOUT:
                    self._send()
                if event & ~select.POLLOUT:
                    self._read(output)
            # Also when something came: it may have been nothing that this waits for.
            if left <= 0:
                break
        stdout, stderr = (b"".join(output[kind]) for kind in (_STDOUT, _STDERR))
        self._tail = (self._tail + stderr[-TAIL_BYTES:])[-TAIL_BYTES:]
        return Output(stdout, stderr, self._code)

    def close(self) -> None:
        """See Process."""
        # The stream closes first: adbd then hangs up the program even if this process is killed meanwhile.
        self._stream.close()
        end, self._end = self._end, None
        if end is not None and self._code is None:
            end()

    def _send(self) -> None:
        try:
            while self._sending:
                self._sending = self._sending[self._stream.send(self._sending) :]
        except BlockingIOError:
            return
        except OSError:
            # The program ended without reading everything: its exit code is on the way, or the end of the stream.
            self._sending = self._sending[:0]

    def _read(self, output: dict[int, list[bytes]]) -> None:
        try:
            data = self._stream.recv(_READ_BYTES)
            acknowledge(self._stream)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broke(f"the connection broke: {error.strerror}") from None
        if not data:
            raise self._broke("the connection ended before the program did")
        self._received += data
        position = 0
        while len(self._received) - position >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._received, position)
            if size > _FRAME_BYTES:
                problem = f"announced a frame of {size} bytes: it does not speak adb's shell protocol v2"
                stderr = self._tail.decode(errors="replace")
                raise DeviceError(self._serial, problem, argv=self._argv, stderr=stderr)
            start = position + _FRAME.size
            if len(self._received) < start + size:
                break
            payload = bytes(memoryview(self._received)[start : start + size])
            position = start + size
            if kind in output and payload:
                output[kind].append(payload)
            elif kind == _EXIT and payload:
                self._code = payload[0]
        del self._received[:position]

    def _broke(self, problem: str) -> DeviceError:
        return self._host.classify(self._serial, problem, argv=self._argv, stderr=self._tail.decode(errors="replace"))
