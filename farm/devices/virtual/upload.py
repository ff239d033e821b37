"""A file that adb's sync protocol brings to a device, as it grows in its place, and the faults that strike it."""

# Names on a device are bytes, which pathlib does not take.
# ruff: noqa: PTH102, PTH108, PTH118, PTH120, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from farm.devices.adb.sync_protocol import PATH_BYTES
from farm.devices.virtual.faults import CONDITIONS, Fault, FaultKind
from farm.devices.virtual.streams import StreamClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

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
        if self._faults.free_bytes is not None:
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
            # Times are shown with the skew of the clock, and this one is the host's.
            modified = max(0, modified - self._faults.skew_s)
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
