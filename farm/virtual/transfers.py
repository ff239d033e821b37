"""Files on their way to and from a virtual device, and the faults that strike them there."""

# Names on a device are bytes, which pathlib does not take.
# ruff: noqa: PTH101, PTH103, PTH104, PTH108, PTH118, PTH120, PTH123, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from farm.devices.adb.sync_protocol import DATA_BYTES, PATH_BYTES
from farm.virtual.faults import CONDITIONS, FaultKind
from farm.virtual.streams import StreamClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import BinaryIO

    from farm.virtual.faults import Fault
    from farm.virtual.injection import Injection
    from farm.virtual.tree import DeviceTree

_CHANGED_BIT = 1


def meets(faults: Injection, operation: str, path: bytes) -> Fault | None:
    """Return the fault that an operation on a file meets."""
    return faults.strike(operation, path.decode(errors="surrogateescape")) if faults.armed else None


class Upload:
    """A file that grows beside the others until it is whole, and then takes its place."""

    def __init__(self, tree: DeviceTree, faults: Injection, path: bytes, mode: int) -> None:
        self._tree, self._faults, self._path, self._mode = tree, faults, path, mode
        self._upload = tree.new_upload()
        self._file: BinaryIO | None = None
        self._fault = meets(faults, "link" if stat.S_ISLNK(mode) else "push", path)
        self._left = self._fault.after_bytes if self._fault is not None and self._fault.kind not in CONDITIONS else 0
        self.problem = ""
        """What went wrong with the file system, in one line; the rest of the file is then for nothing."""
        try:
            self._file = open(self._upload, "xb")  # noqa: SIM115 - closed by close
        except OSError as error:
            self.problem = _reason(error)

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
        """Let it take its place, unless there is a `problem`. Raises StreamClosedError to hang up."""
        if self._fault is not None:
            self._store(await self._meet(self._fault, memoryview(b"")))
        if self._file is not None and not self.problem:
            self.problem = _problem(self._file.close) or _problem(self._publish, modified)

    def close(self) -> None:
        """Leave nothing of it behind but what took its place."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._upload)
        if self._faults.free_bytes is not None:
            self._faults.tell_space()

    def _store(self, piece: memoryview) -> None:
        if self._faults.free_bytes is not None and not self._faults.use_space(len(piece)):
            self.problem = self.problem or f"write failed: {os.strerror(errno.ENOSPC)}"
        if self._file is not None and not self.problem:
            self.problem = _problem(self._file.write, piece)

    async def _meet(self, fault: Fault, piece: memoryview) -> memoryview:
        """Let the fault strike in front of `piece`, and return what arrives of that."""
        self._fault = None
        kind = FaultKind(fault.kind)
        if kind is FaultKind.DROP_PUSH:
            raise StreamClosedError
        if kind is FaultKind.CORRUPT_PUSH:
            return memoryview(_changed(piece or self._last_byte()))
        if kind is FaultKind.REBOOT and self._file is not None:
            # What had come is on the storage of a phone by then.
            self._file.close()
            _problem(self._publish, 0)
        await self._faults.hit(fault)
        return piece

    def _last_byte(self) -> bytes:
        """Return the last byte that was stored, to be stored anew; an empty file has one too many after this."""
        if self._file is None or not self._file.tell():
            return b"\0"
        self._file.seek(-1, os.SEEK_END)
        with open(self._upload, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read()

    def _publish(self, modified: int) -> None:
        """Let what is there take its place. Raises OSError."""
        tree, upload = self._tree, self._upload
        if stat.S_ISLNK(self._mode):
            with open(upload, "rb") as file:
                link = file.read(PATH_BYTES).rstrip(b"\0")
            real = tree.resolve(os.path.join(os.path.dirname(self._path), link))
            os.unlink(upload)
            os.symlink(real if link.startswith(b"/") else link, upload)
        else:
            os.chmod(upload, self._mode & 0o777)
            # Times are shown with the skew of the clock, and this one is the host's.
            modified = max(0, modified - self._faults.skew_s)
            os.utime(upload, (modified, modified))
        place = tree.resolve(self._path, follow=False)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        # As adbd does. Some file systems write a whole file out when it takes the place of another.
        with contextlib.suppress(OSError):
            os.unlink(place)
        os.rename(upload, place)


async def download(number: int, fault: Fault, faults: Injection) -> AsyncIterator[bytes]:
    """Yield the pieces of the open file `number` as they leave the device. Raises StreamClosedError to hang up.

    Everything that was yielded has to be on its way before the next piece is asked for.
    """
    kind, size = FaultKind(fault.kind), os.fstat(number).st_size
    left = fault.after_bytes if kind is not FaultKind.CORRUPT_PULL else max(0, min(fault.after_bytes, size - 1))
    while left and (data := os.read(number, min(left, DATA_BYTES))):
        left -= len(data)
        yield data
    if kind is FaultKind.DROP_PULL:
        raise StreamClosedError
    if kind is FaultKind.CORRUPT_PULL:
        yield _changed(os.read(number, 1) or b"\0")
    else:
        await faults.hit(fault)
    while data := os.read(number, DATA_BYTES):
        yield data


def _changed(data: bytes | memoryview) -> bytes:
    changed = bytearray(data)
    changed[0] ^= _CHANGED_BIT
    return bytes(changed)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _problem(step: Callable[..., object], *arguments: object) -> str:
    """Do a step and return what went wrong with the file system, in one line; empty when nothing did."""
    try:
        step(*arguments)
    except OSError as error:
        return _reason(error)
    return ""
