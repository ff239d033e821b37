"""The device's end of adb's sync protocol: stat, list, upload and download, with injected faults."""

# Names on a device are bytes, which pathlib does not take.
# ruff: noqa: PTH102, PTH108, PTH118, PTH120, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from farm.devices.adb.protocol import (
    DATA_BYTES,
    ENTRY_V1,
    ENTRY_V2,
    MESSAGE,
    PATH_BYTES,
    STAT_V1,
    STAT_V2,
    ProtocolError,
    data_messages,
)
from farm.devices.virtual.faults import CONDITIONS, Fault, FaultKind
from farm.devices.virtual.streams import Stream, StreamClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from farm.devices.virtual.injection import Injection
    from farm.devices.virtual.tree import DeviceTree

_THERE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Upload:
    """A file that grows in its place, as adbd's does: file_sync_service.cpp of AOSP's packages/modules/adb."""

    def __init__(self, tree: DeviceTree, faults: Injection, path: bytes, mode: int) -> None:
        """Move an existing file away. `mode` is the host's: the rights of its user become those for all users."""
        self._tree, self._faults, self._path, self._mode = tree, faults, path, mode
        self._place = b""
        self._file: BinaryIO | None = None
        self._link = bytearray()
        self._stays = False
        self._fault = faults.strike_file("link" if stat.S_ISLNK(mode) else "push", path)
        self._left = self._fault.after_bytes if self._fault is not None and self._fault.kind not in CONDITIONS else 0
        self.problem = _problem("couldn't create file", self._create)
        """Failure in one line; the rest of the file is then discarded."""

    async def add(self, piece: memoryview) -> None:
        """Take what came next. Raises StreamClosedError to hang up."""
        if self._fault is not None:
            before, piece = piece[: self._left], piece[self._left :]
            self._store(before)
            self._left -= len(before)
            if not piece:
                return
            piece = await self._meet(self._fault, piece)
        self._store(piece)

    async def finish(self, modified: int) -> None:
        """Let it stay, unless there is a `problem`. Raises StreamClosedError to hang up."""
        if self._fault is not None:
            self._store(await self._meet(self._fault, memoryview(b"")))
        if not self.problem:
            if stat.S_ISLNK(self._mode):
                self.problem = _problem("symlink failed", self._make_link)
            else:
                self.problem = _problem("write failed", self._complete, modified)
        self._stays = not self.problem

    def close(self) -> None:
        """Leave nothing of it behind, unless it is whole."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            if not self._stays:
                with contextlib.suppress(OSError):
                    os.unlink(self._place)
        self._faults.tell_space()

    def _create(self) -> None:
        """Make an empty file, with its folders. Raises OSError."""
        if self._path.endswith(b"/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._place = place = self._tree.resolve(self._path, follow=False)
        with contextlib.suppress(OSError):
            os.unlink(place)
        if stat.S_ISLNK(self._mode):
            return
        try:
            number = os.open(place, _THERE | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:
            self._make_folders()
            number = os.open(place, _THERE | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            # Special files are opened in place; a folder raises its error here.
            number = os.open(place, _THERE)
        self._file = os.fdopen(number, "r+b")
        mode = self._mode & 0o777
        mode |= mode >> 3 & 0o070
        os.fchmod(number, mode | mode >> 3 & 0o007)

    def _make_folders(self) -> None:
        folder = os.path.dirname(self._place)
        missing = []
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            os.mkdir(one, 0o775)

    def _make_link(self) -> None:
        """Raises OSError."""
        target = bytes(self._link).rstrip(b"\0")
        if target.startswith(b"/"):
            target = self._tree.resolve(target)
        else:
            self._tree.resolve(os.path.join(os.path.dirname(self._path), target))
        try:
            os.symlink(target, self._place)
        except FileNotFoundError:
            self._make_folders()
            os.symlink(target, self._place)

    def _complete(self, modified: int) -> None:
        """Raises OSError."""
        if self._file is not None:
            self._file.close()
            os.utime(self._place, (modified, modified))

    def _store(self, piece: memoryview) -> None:
        if self._faults.free_bytes is not None and not self._faults.use_space(len(piece)):
            self.problem = self.problem or f"write failed: {os.strerror(errno.ENOSPC)}"
        if self.problem:
            return
        if self._file is not None:
            self.problem = _problem("write failed", self._file.write, piece)
        elif len(self._link) <= PATH_BYTES:
            self._link += piece

    async def _meet(self, fault: Fault, piece: memoryview) -> memoryview:
        """Let the fault strike in front of `piece`, and return what arrives of that."""
        self._fault = None
        kind = FaultKind(fault.kind)
        if kind is FaultKind.DROP_PUSH:
            raise StreamClosedError
        if kind is FaultKind.CORRUPT_PUSH:
            return memoryview(changed(piece or self._last_byte()))
        # A phone has stored the received part at a reboot.
        self._stays = kind is FaultKind.REBOOT
        await self._faults.hit(fault)
        return piece

    def _last_byte(self) -> bytes:
        """Return the last byte that was stored, to be stored anew; an empty file has one too many after this."""
        if self._file is None or not self._file.tell():
            return b"\0"
        self._file.seek(-1, os.SEEK_END)
        last = self._file.read(1)
        self._file.seek(-1, os.SEEK_END)
        return last


def changed(data: bytes | memoryview) -> bytes:
    """Return data whose first byte is another one."""
    changed = bytearray(data)
    changed[0] ^= 1
    return bytes(changed)


def _problem(what: str, step: Callable[..., object], *arguments: object) -> str:
    """Do a step and return what went wrong with the file system, in adbd's words; empty when nothing did."""
    try:
        step(*arguments)
    except OSError as error:
        return f"{what}: {error.strerror or type(error).__name__}"
    return ""


# Bytes of answers that are sent as one write: a packet.
_BATCH_BYTES = 1 << 20
_U32 = 0xFFFFFFFF


class SyncSession:
    """Sync stream, from its first request to QUIT."""

    def __init__(self, stream: Stream, tree: DeviceTree, faults: Injection) -> None:
        self._stream, self._tree, self._faults = stream, tree, faults
        self._in = memoryview(b"")
        self._out = bytearray()
        self._failed = False

    async def serve(self) -> None:
        """Answer requests until the host sends QUIT."""
        handlers: dict[bytes, Callable[[bytes], Awaitable[None]]] = {
            b"STAT": self._stat_v1,
            b"STA2": partial(self._stat_v2, b"STA2", follow=True),
            b"LST2": partial(self._stat_v2, b"LST2", follow=False),
            b"LIST": partial(self._list, ENTRY_V1, b"DENT", _record_v1),
            b"LIS2": partial(self._list, ENTRY_V2, b"DNT2", _record_v2),
            b"SEND": self._send,
            b"RECV": self._receive,
        }
        with contextlib.suppress(ProtocolError, EOFError):
            while True:
                kind, size = await self._message()
                if kind == b"QUIT":
                    break
                if kind not in handlers or size > PATH_BYTES:
                    await self._fail(f"unknown command {kind.hex()}" if kind not in handlers else "path too long")
                    break
                await handlers[kind](await self._exactly(size))
                if self._failed:
                    # adbd ends the stream after a file that could not be sent or received.
                    break
        await self._flush()

    async def _stat_v1(self, path: bytes) -> None:
        record: tuple[int, ...] = (0, 0, 0)
        with contextlib.suppress(OSError):
            record = _record_v1(os.lstat(self._tree.resolve(path, follow=False)))
        await self._reply(STAT_V1.pack(b"STAT", *record))

    async def _stat_v2(self, kind: bytes, path: bytes, *, follow: bool) -> None:
        try:
            record = _record_v2(os.lstat(self._tree.resolve(path, follow=follow)))
        except OSError as error:
            record = (error.errno or errno.EIO, *(0,) * 10)
        await self._reply(STAT_V2.pack(kind, *record))

    async def _list(
        self, entry: struct.Struct, kind: bytes, record: Callable[[os.stat_result], tuple[int, ...]], path: bytes
    ) -> None:
        # A folder that cannot be read is empty for adb, which asks for its stat first.
        with contextlib.suppress(OSError):
            folder = self._tree.resolve(path)
            for name in self._tree.names(folder):
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(os.path.join(folder, name))
                    await self._reply(entry.pack(kind, *record(found), len(name)) + name)
        await self._reply(b"DONE".ljust(entry.size, b"\0"))

    async def _send(self, argument: bytes) -> None:
        path, _, mode = argument.rpartition(b",")
        if not mode.isdigit():
            await self._fail("missing , in ID_SEND_V1")
            return
        upload = Upload(self._tree, self._faults, path, int(mode))
        try:
            # After a failure the host still sends the rest, and reads the answer only then.
            while (message := await self._message())[0] == b"DATA":
                async for piece in self._pieces(message[1]):
                    await upload.add(piece)
            if message[0] != b"DONE":
                raise ProtocolError(f"{message[0]!r} inside of a file")
            await upload.finish(message[1])
        finally:
            upload.close()
        if upload.problem:
            await self._fail(upload.problem)
        else:
            await self._reply(MESSAGE.pack(b"OKAY", 0))

    async def _receive(self, path: bytes) -> None:
        try:
            number = os.open(self._tree.resolve(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            await self._fail(f"open failed: {error.strerror}")
            return
        try:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                # adbd opens a folder and cannot read it; for a pipe it waits, perhaps for ever.
                what = f"read failed: {os.strerror(errno.EISDIR)}" if stat.S_ISDIR(mode) else "not a regular file"
                await self._fail(what)
                return
            if fault := self._faults.strike_file("pull", path):
                async for piece in _download(number, fault, self._faults):
                    await self._reply(MESSAGE.pack(b"DATA", len(piece)) + piece)
                    await self._flush()
            else:
                for message in data_messages(number):
                    await self._reply(message)
            await self._reply(MESSAGE.pack(b"DONE", 0))
        finally:
            os.close(number)

    async def _reply(self, data: bytes) -> None:
        """Queue an answer; small answers are sent together, before the next wait for a request."""
        self._out += data
        if len(self._out) >= _BATCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._out:
            data, self._out = self._out, bytearray()
            await self._stream.write(data)

    async def _fail(self, problem: str) -> None:
        self._failed = True
        reason = problem.encode()
        await self._reply(MESSAGE.pack(b"FAIL", len(reason)) + reason)

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


def _record_v1(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mode & _U32, found.st_size & _U32, int(found.st_mtime) & _U32


def _record_v2(found: os.stat_result) -> tuple[int, ...]:
    """Return the fields of a v2 stat record, from the error on."""
    times = map(int, (found.st_atime, found.st_mtime, found.st_ctime))
    owner = (found.st_uid, found.st_gid)
    return (0, found.st_dev, found.st_ino, found.st_mode, found.st_nlink, *owner, found.st_size, *times)


async def _download(number: int, fault: Fault, faults: Injection) -> AsyncIterator[bytes]:
    """Yield the pieces of the open file `number` with the effect of `fault`. Raises StreamClosedError to hang up.

    The caller sends each piece before it requests the next, so that a fault strikes after exactly these bytes.
    """
    kind, size = FaultKind(fault.kind), os.fstat(number).st_size
    left = fault.after_bytes if kind is not FaultKind.CORRUPT_PULL else max(0, min(fault.after_bytes, size - 1))
    while left and (data := os.read(number, min(left, DATA_BYTES))):
        left -= len(data)
        yield data
    if kind is FaultKind.DROP_PULL:
        raise StreamClosedError
    if kind is FaultKind.CORRUPT_PULL:
        yield changed(os.read(number, 1) or b"\0")
    else:
        await faults.hit(fault)
    while data := os.read(number, DATA_BYTES):
        yield data
