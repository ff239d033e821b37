"""The host's end of adb's sync protocol: many files over one stream, answers read behind the requests."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from farm.base.errors import DeviceError, DeviceSpaceError
from farm.base.text import clean_text, says_full
from farm.devices.adb.host import acknowledge
from farm.devices.adb.protocol import DATA_BYTES, MESSAGE, PATH_BYTES, DataFrames
from farm.devices.files import MinThroughput, local_errors, replacing
from farm.devices.process import Link

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from pathlib import Path, PurePosixPath

# Requests on their way before an answer is read: hides the round trip, and their answers fit into socket buffers.
_WINDOW = 32
_BUFFER = 1 << 20


class SyncStream:
    """Stream to a device's sync service for any number of transfers; unusable after an error."""

    def __init__(self, stream: socket.socket, serial: str, stall_s: float) -> None:
        """`stall_s` is how long the device may move nothing."""
        stream.settimeout(stall_s)
        self._stream, self._serial, self._stall_s = stream, serial, stall_s
        self._throughput = MinThroughput(serial, 0, stall_s)
        self._out = bytearray()
        self._buffer = memoryview(bytearray(_BUFFER))
        self._in = self._buffer[:0]
        self._frames = DataFrames()
        self._links: set[PurePosixPath] = set()

    def close(self) -> None:
        """Hang up."""
        self._stream.close()

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write every file. Raises DeviceError with the path that failed, InfraError for an unreadable local file.

        A link that the device does not make is a LinkRefusedError.
        """
        self._throughput = MinThroughput(self._serial, len(files), self._stall_s)
        pending: deque[PurePosixPath] = deque()
        self._links = {path for path, source in files.items() if isinstance(source, Link)}
        try:
            for path, source in files.items():
                pending.append(path)
                self._send_file(path, source)
                if len(pending) >= _WINDOW:
                    self._expect_okay(pending)
            self._flush()
        except HungUpError as error:
            # A device that hangs up has sent the reason before, unless its cable was pulled.
            self._out.clear()
            with contextlib.suppress(HungUpError):
                while pending:
                    self._expect_okay(pending)
            raise error from None
        while pending:
            self._expect_okay(pending)

    def pull(self, files: Mapping[PurePosixPath, Path], limits: Mapping[PurePosixPath, int]) -> None:
        """Read every file. Raises DeviceError for a file that is missing or larger than its limit."""
        self._throughput = MinThroughput(self._serial, len(files), self._stall_s)
        unasked = iter(files)
        for number, path in enumerate(files):
            for other in islice(unasked, 1 if number else _WINDOW):
                self._request(b"RECV", _name(other, self._serial))
            self._receive_file(path, files[path], limits[path])

    def _send_file(self, path: PurePosixPath, source: Path | bytes | Link) -> None:
        name = _name(path, self._serial)
        if isinstance(source, Link):
            # adbd takes the target as a string that ends with NUL.
            target = os.fsencode(source.target) + b"\0"
            self._request(b"SEND", name + b",%d" % (stat.S_IFLNK | 0o777))
            self._write(MESSAGE.pack(b"DATA", len(target)) + target + MESSAGE.pack(b"DONE", int(time.time())))
            return
        if isinstance(source, bytes):
            self._request(b"SEND", name + b",%d" % (stat.S_IFREG | 0o644))
            for start in range(0, len(source), DATA_BYTES):
                chunk = source[start : start + DATA_BYTES]
                self._write(MESSAGE.pack(b"DATA", len(chunk)))
                self._write(chunk)
            modified = time.time()
        else:
            with local_errors(source), source.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                mode = 0o755 if status.st_mode & 0o111 else 0o644
                self._request(b"SEND", name + b",%d" % (stat.S_IFREG | mode))
                for frames in iter(lambda: self._frames.read(file.fileno()), b""):
                    self._write(frames)
                modified = status.st_mtime
        self._write(MESSAGE.pack(b"DONE", int(modified) & 0xFFFFFFFF))

    def _expect_okay(self, pending: deque[PurePosixPath]) -> None:
        self._flush()
        path = pending[0]
        kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
        if kind != b"OKAY":
            raise self._failure("push", path, kind, size)
        pending.popleft()

    def _receive_file(self, path: PurePosixPath, local: Path, limit: int) -> None:
        self._flush()
        kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
        if kind not in {b"DATA", b"DONE"}:
            raise self._failure("pull", path, kind, size)
        with replacing(local) as file:
            left = limit
            while kind == b"DATA":
                left -= size
                if not size:
                    # adbd sends none: without end they would be no byte too many, and no stall.
                    raise DeviceError(self._serial, f"pull of {path}: sent a part of 0 bytes, which adb never does")
                if size > DATA_BYTES or left < 0:
                    raise DeviceError(self._serial, f"pull of {path}: it has more than the {limit} bytes it may have")
                for piece in self._pieces(size):
                    file.write(piece)
                kind, size = MESSAGE.unpack(self._exactly(MESSAGE.size))
            if kind != b"DONE":
                raise self._failure("pull", path, kind, size)

    def _failure(self, what: str, path: PurePosixPath, kind: bytes, size: int) -> DeviceError:
        if kind != b"FAIL":
            return DeviceError(self._serial, f"{what} of {path}: answered {kind!r}, which is not adb's sync protocol")
        reason = clean_text(self._exactly(min(size, PATH_BYTES)))
        if says_full(reason):
            return DeviceSpaceError(self._serial, f"{what} of {path}: {reason}: remove files there")
        error = LinkRefusedError if path in self._links else DeviceError
        return error(self._serial, f"{what} of {path}: {reason}")

    def _request(self, kind: bytes, argument: bytes) -> None:
        self._write(MESSAGE.pack(kind, len(argument)) + argument)

    def _write(self, data: bytes | memoryview) -> None:
        if len(data) >= DATA_BYTES:
            self._flush()
            self._sendall(data)
            return
        self._out += data
        if len(self._out) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            self._sendall(self._out)
            self._out.clear()

    def _sendall(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._stream.sendall(data)
        except TimeoutError:
            raise self._throughput.stalled() from None
        except OSError as error:
            raise HungUpError(self._serial, f"the connection broke during a push: {error.strerror}") from None
        self._throughput.moved(len(data))

    def _receive(self) -> int:
        try:
            count = self._stream.recv_into(self._buffer)
            acknowledge(self._stream)
        except TimeoutError:
            raise self._throughput.stalled() from None
        except OSError as error:
            raise HungUpError(self._serial, f"the connection broke while files moved: {error.strerror}") from None
        if not count:
            raise HungUpError(self._serial, "the connection ended while files moved")
        self._throughput.moved(count)
        return count

    def _pieces(self, size: int) -> Iterator[memoryview]:
        """Return the next `size` bytes, each piece valid until the next."""
        while size:
            if not self._in:
                self._in = self._buffer[: self._receive()]
            piece, self._in = self._in[:size], self._in[size:]
            size -= len(piece)
            yield piece

    def _exactly(self, size: int) -> bytes:
        return b"".join(bytes(piece) for piece in self._pieces(size))


class HungUpError(DeviceError):
    """The stream is gone."""


class LinkRefusedError(DeviceError):
    """The device makes no symbolic link for the sync service."""


def _name(path: PurePosixPath, serial: str) -> bytes:
    name = os.fsencode(path)
    if not path.is_absolute() or len(name) > PATH_BYTES or b"\0" in name:
        raise DeviceError(serial, f"{str(path)[:100]!r} cannot be a path on a device: absolute, at most 1024 bytes")
    return name
