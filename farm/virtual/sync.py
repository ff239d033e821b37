"""The device's end of adb's sync protocol: stat, list, upload and download below the device's root."""

# Names on a device are bytes, which pathlib does not take.
# ruff: noqa: PTH101, PTH103, PTH104, PTH108, PTH118, PTH120, PTH123, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from farm.devices.sync_protocol import (
    DATA_BYTES,
    ENTRY_V1,
    ENTRY_V2,
    MESSAGE,
    PATH_BYTES,
    STAT_V1,
    STAT_V2,
    DataFrames,
)
from farm.virtual.wire import ProtocolError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import BinaryIO

    from farm.virtual.streams import Stream
    from farm.virtual.tree import DeviceTree

# Answers that travel together.
_BATCH_BYTES = 256 * 1024
_U32 = 0xFFFFFFFF


class SyncSession:
    """One sync stream, from its first request to QUIT."""

    def __init__(self, stream: Stream, tree: DeviceTree) -> None:
        self._stream, self._tree = stream, tree
        self._in = memoryview(b"")
        self._out = bytearray()
        self._frames = DataFrames()

    async def serve(self) -> None:
        """Answer requests until the host has no more."""
        handlers = {
            b"STAT": self._stat_v1,
            b"STA2": self._stat_v2,
            b"LST2": self._lstat_v2,
            b"LIST": self._list_v1,
            b"LIS2": self._list_v2,
            b"SEND": self._send,
            b"RECV": self._receive,
        }
        with contextlib.suppress(ProtocolError, EOFError):
            while True:
                kind, size = await self._message()
                if kind == b"QUIT":
                    break
                if kind not in handlers or size > PATH_BYTES:
                    await self._fail("unknown request" if kind not in handlers else "path too long")
                    break
                await handlers[kind](await self._exactly(size))
        await self._flush()

    async def _stat_v1(self, path: bytes) -> None:
        mode = size = modified = 0
        with contextlib.suppress(OSError):
            found = os.lstat(self._tree.resolve(path, follow=False))
            mode, size, modified = found.st_mode, found.st_size & _U32, int(found.st_mtime) & _U32
        await self._reply(STAT_V1.pack(b"STAT", mode, size, modified))

    async def _stat_v2(self, path: bytes) -> None:
        await self._reply(STAT_V2.pack(b"STA2", *self._describe(path, follow=True)))

    async def _lstat_v2(self, path: bytes) -> None:
        await self._reply(STAT_V2.pack(b"LST2", *self._describe(path, follow=False)))

    def _describe(self, path: bytes, *, follow: bool) -> tuple[int, ...]:
        try:
            return _record(os.lstat(self._tree.resolve(path, follow=follow)))
        except OSError as error:
            return (error.errno or errno.EIO, *(0,) * 10)

    async def _list_v1(self, path: bytes) -> None:
        def pack(found: os.stat_result, length: int) -> bytes:
            return ENTRY_V1.pack(
                b"DENT", found.st_mode & _U32, found.st_size & _U32, int(found.st_mtime) & _U32, length
            )

        await self._list(path, pack)
        await self._reply(ENTRY_V1.pack(b"DONE", *(0,) * 4))

    async def _list_v2(self, path: bytes) -> None:
        await self._list(path, lambda found, length: ENTRY_V2.pack(b"DNT2", *_record(found), length))
        await self._reply(ENTRY_V2.pack(b"DONE", *(0,) * 12))

    async def _list(self, path: bytes, pack: Callable[[os.stat_result, int], bytes]) -> None:
        batch = bytearray()
        # A folder that cannot be read is empty for adb, which asks for its stat first.
        with contextlib.suppress(OSError):
            folder = self._tree.resolve(path)
            for name in self._tree.names(folder):
                with contextlib.suppress(FileNotFoundError):
                    batch += pack(os.lstat(os.path.join(folder, name)), len(name)) + name
                if len(batch) > _BATCH_BYTES:
                    await self._reply(batch)
                    batch.clear()
        await self._reply(batch)

    async def _send(self, argument: bytes) -> None:
        path, _, said = argument.rpartition(b",")
        mode = int(said) if said.isdigit() else 0o644
        upload = self._tree.new_upload()
        problem = ""
        file: BinaryIO | None = None
        try:
            try:
                file = open(upload, "xb")  # noqa: SIM115 - closed below
            except OSError as error:
                problem = error.strerror or type(error).__name__
            # After a failure the host still sends the rest, and reads the answer only then.
            while (message := await self._message())[0] == b"DATA":
                async for piece in self._pieces(message[1]):
                    if file is not None and not problem:
                        problem = _problem(file.write, piece)
            if message[0] != b"DONE":
                raise ProtocolError(f"{message[0]!r} inside of a file")
            if file is not None and not problem:
                problem = _problem(file.close) or _problem(self._publish, upload, path, mode, message[1])
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(upload)
        if problem:
            await self._fail(problem)
        else:
            await self._reply(MESSAGE.pack(b"OKAY", 0))

    def _publish(self, upload: bytes, path: bytes, mode: int, modified: int) -> None:
        """Let the whole upload take its place. Raises OSError."""
        if stat.S_ISLNK(mode):
            with open(upload, "rb") as file:
                link = file.read(PATH_BYTES).rstrip(b"\0")
            real = self._tree.resolve(os.path.join(os.path.dirname(path), link))
            os.unlink(upload)
            os.symlink(real if link.startswith(b"/") else link, upload)
        else:
            os.chmod(upload, mode & 0o777)
            os.utime(upload, (modified, modified))
        place = self._tree.resolve(path, follow=False)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        # As adbd does. Some file systems write a whole file out when it takes the place of another.
        with contextlib.suppress(OSError):
            os.unlink(place)
        os.rename(upload, place)

    async def _receive(self, path: bytes) -> None:
        try:
            number = os.open(self._tree.resolve(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            await self._fail(f"open failed: {error.strerror}")
            return
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                await self._fail("open failed: not a regular file")
                return
            while data := self._frames.read(number):
                await self._reply(data)
            await self._reply(MESSAGE.pack(b"DONE", 0))
        finally:
            os.close(number)

    async def _reply(self, data: bytes | bytearray | memoryview) -> None:
        """Answer; small answers to requests that are here already travel together."""
        if len(data) >= _BATCH_BYTES:
            await self._flush()
            await self._stream.write(data)
        else:
            self._out += data
            if len(self._out) >= _BATCH_BYTES:
                await self._flush()

    async def _flush(self) -> None:
        if self._out:
            data, self._out = self._out, bytearray()
            await self._stream.write(data)

    async def _fail(self, problem: str) -> None:
        said = problem.encode()
        await self._reply(MESSAGE.pack(b"FAIL", len(said)) + said)

    async def _message(self) -> tuple[bytes, int]:
        kind, size = MESSAGE.unpack(await self._exactly(MESSAGE.size))
        if kind == b"DATA" and size > DATA_BYTES:
            raise ProtocolError("more data at once than the protocol allows")
        return kind, size

    async def _exactly(self, size: int) -> bytes:
        if len(self._in) >= size:
            piece, self._in = self._in[:size], self._in[size:]
            return bytes(piece)
        return b"".join([bytes(piece) async for piece in self._pieces(size)])

    async def _pieces(self, size: int) -> AsyncIterator[memoryview]:
        """Return the next `size` bytes as they come. Raises EOFError when the host has closed."""
        while size:
            if not self._in:
                await self._flush()
                data = await self._stream.read()
                if data is None:
                    raise EOFError
                self._in = memoryview(data)
            piece, self._in = self._in[:size], self._in[size:]
            size -= len(piece)
            yield piece


def _record(found: os.stat_result) -> tuple[int, ...]:
    """Return the fields of a v2 stat record, from the error on."""
    times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
    owner = (found.st_uid, found.st_gid)
    return (0, found.st_dev, found.st_ino, found.st_mode, found.st_nlink, *owner, found.st_size, *times)


def _problem(step: Callable[..., object], *arguments: object) -> str:
    """Do a step and return what went wrong with the file system, in one line; empty when nothing did."""
    try:
        step(*arguments)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
