"""The host's end of adb's sync protocol: many files over one stream, answers read behind the requests."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from farm.devices.sync_protocol import DATA_BYTES, MESSAGE, PATH_BYTES, DataFrames
from farm.devices.text import clean_text
from farm.errors import DeviceError, DeviceTimeoutError, InfraError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import PurePosixPath
    from typing import BinaryIO

# Requests on their way before an answer is read: hides the round trip, and their answers fit into socket buffers.
_WINDOW = 32
_BUFFER = 1 << 20


class SyncStream:
    """One stream to a device's sync service. It belongs to the caller; after an error it is of no use."""

    def __init__(self, stream: socket.socket, serial: str) -> None:
        self._stream, self._serial = stream, serial
        self._out = bytearray()
        self._buffer = memoryview(bytearray(_BUFFER))
        self._in = self._buffer[:0]
        self._frames = DataFrames()

    def push(self, files: Mapping[PurePosixPath, Path | bytes]) -> None:
        """Write every file. Raises DeviceError with the path that failed, InfraError for an unreadable local file."""
        with self._failures():
            pending: deque[PurePosixPath] = deque()
            try:
                for path, source in files.items():
                    pending.append(path)
                    self._send_file(path, source)
                    if len(pending) >= _WINDOW:
                        self._expect_okay(pending)
            except (BrokenPipeError, ConnectionResetError):
                # A device that hangs up has said why, unless its cable was pulled.
                self._out.clear()
                while pending:
                    self._expect_okay(pending)
                raise
            while pending:
                self._expect_okay(pending)

    def pull(self, files: Mapping[PurePosixPath, Path], limits: Mapping[PurePosixPath, int]) -> None:
        """Read every file. Raises DeviceError for one that is missing or larger than its limit."""
        with self._failures():
            waiting = iter(files)
            asked: deque[PurePosixPath] = deque()
            for path in waiting:
                self._request(b"RECV", path, _name(path, self._serial))
                asked.append(path)
                if len(asked) >= _WINDOW:
                    first = asked.popleft()
                    self._receive_file(first, files[first], limits[first])
            for path in asked:
                self._receive_file(path, files[path], limits[path])

    def _send_file(self, path: PurePosixPath, source: Path | bytes) -> None:
        name = _name(path, self._serial)
        if isinstance(source, bytes):
            self._request(b"SEND", path, name + b",%d" % (stat.S_IFREG | 0o644))
            for start in range(0, len(source), DATA_BYTES):
                chunk = source[start : start + DATA_BYTES]
                self._write(MESSAGE.pack(b"DATA", len(chunk)))
                self._write(chunk)
            modified = time.time()
        else:
            with _open_local(source) as file:
                status = os.fstat(file.fileno())
                mode = 0o755 if status.st_mode & 0o111 else 0o644
                self._request(b"SEND", path, name + b",%d" % (stat.S_IFREG | mode))
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
        with _replacing(local) as file:
            left = limit
            while kind == b"DATA":
                left -= size
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
        return DeviceError(self._serial, f"{what} of {path}: {reason}")

    def _request(self, kind: bytes, path: PurePosixPath, argument: bytes) -> None:
        if not path.is_absolute():
            raise DeviceError(self._serial, f"{path} is not an absolute path on the device")
        self._write(MESSAGE.pack(kind, len(argument)) + argument)

    def _write(self, data: bytes | memoryview) -> None:
        if len(data) >= DATA_BYTES:
            self._flush()
            self._stream.sendall(data)
            return
        self._out += data
        if len(self._out) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            self._stream.sendall(self._out)
            self._out.clear()

    def _pieces(self, size: int) -> Iterator[memoryview]:
        """Return the next `size` bytes, each piece valid until the next."""
        while size:
            if not self._in:
                count = self._stream.recv_into(self._buffer)
                if not count:
                    raise ConnectionResetError(0, "it ended")
                self._in = self._buffer[:count]
            piece, self._in = self._in[:size], self._in[size:]
            size -= len(piece)
            yield piece

    def _exactly(self, size: int) -> bytes:
        return b"".join(bytes(piece) for piece in self._pieces(size))

    def _failures(self) -> AbstractContextManager[None]:
        return _Failures(self._serial, self._stream.gettimeout())


class _Failures:
    """Turns what a socket says into what a device does."""

    def __init__(self, serial: str, timeout_s: float | None) -> None:
        self._serial, self._timeout_s = serial, timeout_s

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            problem = f"moved no byte of a file for {self._timeout_s:g} s: check its cable and its storage"
            raise DeviceTimeoutError(self._serial, problem) from None
        if isinstance(error, OSError):
            raise DeviceError(self._serial, f"the connection broke while files moved: {error.strerror}") from None
