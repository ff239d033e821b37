"""Many files over one SFTP session: round trips are for all of them, not for each."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from paramiko.sftp import SFTP_NO_SUCH_FILE, SFTP_PERMISSION_DENIED

from farm.base.errors import DeviceError, DeviceSpaceError
from farm.devices.local.files import local_errors, replacing
from farm.devices.ssh.sftp_stream import DATA_BYTES, WINDOW, Answer, Attributes, Room, SftpStatus, SftpStream, succeeded
from farm.devices.transport import Link

# Files open on the server at once, closing ones not counted; servers allow some hundred.
_FILES = 32
# Linux' PATH_MAX.
_PATH_BYTES = 4096
# A file system keeps some back; with less than this, and less than a request, it is full.
_FULL_BYTES = DATA_BYTES


class _Piece(NamedTuple):
    """A part of a file that is pulled."""

    path: PurePosixPath
    handle: bytes
    offset: int
    size: int
    is_last: bool


class Files:
    """Moves files over one stream."""

    def __init__(self, stream: SftpStream, serial: str) -> None:
        self._stream, self._serial = stream, serial

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write every file. Raises DeviceError with the path that failed, InfraError for an unreadable local file."""
        names = {path: self._name(path) for path in files}
        self._make_folders(files)

        def make(path: PurePosixPath) -> int:
            source = files[path]
            # An existing file is replaced, also a running program or a link; a missing one is no error.
            self._stream.forget(self._stream.remove(names[path]))
            if isinstance(source, Link):
                return self._stream.link(names[path], os.fsencode(source.target))
            return self._stream.create(names[path], 0o644)

        def write() -> Iterator[tuple[PurePosixPath, int]]:
            for path, answer in self._stream.ahead(files, make, _FILES):
                source = files[path]
                if isinstance(source, Link):
                    self._expect_done(path, answer)
                else:
                    handle = self._handle("push", path, answer)
                    yield from ((path, number) for number in self._write(handle, source))

        for (path, _), answer in self._stream.ahead(write(), lambda written: written[1], WINDOW):
            self._expect_done(path, answer)

    def pull(self, files: Mapping[PurePosixPath, Path], limits: Mapping[PurePosixPath, int]) -> None:
        """Read every file. Raises DeviceError for a file that is missing or larger than its limit."""
        names = {path: self._name(path) for path in files}
        stream = self._stream
        # Opened only when it is known to be a file: opening a pipe would hang the server.
        looked = stream.ahead(files, lambda path: stream.stat(names[path]), _FILES)
        sizes = ((path, self._size(path, answer, limits[path])) for path, answer in looked)
        opened = stream.ahead(sizes, lambda one: stream.open(names[one[0]]), _FILES)
        pieces = stream.ahead(
            self._pieces(opened), lambda piece: stream.read(piece.handle, piece.offset, max(1, piece.size)), WINDOW
        )
        for piece, answer in pieces:
            with replacing(files[piece.path]) as file:
                self._copy(piece, answer, file)
                while not piece.is_last:
                    piece, answer = next(pieces)  # noqa: PLW2901 - the following pieces are of the same file
                    self._copy(piece, answer, file)
            stream.forget(stream.shut(piece.handle))

    def _make_folders(self, files: Iterable[PurePosixPath]) -> None:
        """Make the folders that are not there, in two round trips for all."""
        stream = self._stream
        missing = set()
        for folder, answer in stream.ahead(
            {path.parent: path for path in files}.items(), lambda one: stream.stat(os.fsencode(one[0])), WINDOW
        ):
            if isinstance(answer, Attributes) and not answer.is_folder:
                raise DeviceError(self._serial, f"push of {folder[1]}: {folder[0]}: Not a directory")
            if not isinstance(answer, Attributes):
                missing.add(folder[0])
        # Parents come first.
        wanted = sorted({folder for path in missing for folder in (path, *path.parents) if folder.name})
        for made, answer in stream.ahead(wanted, lambda one: stream.make_folder(os.fsencode(one), 0o755), WINDOW):
            # Most of the others are there already, which has no code of its own.
            if isinstance(answer, SftpStatus) and answer.code == SFTP_PERMISSION_DENIED:
                raise self._refused("push", made, answer)

    def _write(self, handle: bytes, source: Path | bytes) -> Iterator[int]:
        """Ask for a file to be written and closed, and yield the number of each request."""
        mode, offset = 0o644, 0
        if isinstance(source, bytes):
            for offset in range(0, len(source), DATA_BYTES):
                yield self._stream.write(handle, offset, source[offset : offset + DATA_BYTES])
        else:
            with local_errors(source), source.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(0, "not a regular file")
                mode = 0o755 if status.st_mode & 0o111 else 0o644
                for data in iter(lambda: file.read(DATA_BYTES), b""):
                    yield self._stream.write(handle, offset, data)
                    offset += len(data)
        yield self._stream.set_mode(handle, mode)
        yield self._stream.shut(handle)

    def _expect_done(self, path: PurePosixPath, answer: Answer) -> None:
        if not isinstance(answer, SftpStatus) or not succeeded(answer):
            raise self._refused("push", path, answer)

    def _size(self, path: PurePosixPath, answer: Answer, limit: int) -> int:
        if not isinstance(answer, Attributes):
            raise self._refused("pull", path, answer)
        if not answer.is_file:
            raise DeviceError(self._serial, f"pull of {path}: not a regular file")
        if answer.size > limit:
            raise DeviceError(self._serial, f"pull of {path}: it has more than the {limit} bytes it may have")
        return answer.size

    def _pieces(self, opened: Iterator[tuple[tuple[PurePosixPath, int], Answer]]) -> Iterator[_Piece]:
        for (path, size), answer in opened:
            handle = self._handle("pull", path, answer)
            offset = 0
            while size - offset > DATA_BYTES:
                yield _Piece(path, handle, offset, DATA_BYTES, is_last=False)
                offset += DATA_BYTES
            yield _Piece(path, handle, offset, size - offset, is_last=True)

    def _copy(self, piece: _Piece, answer: Answer, file: BinaryIO) -> None:
        """Write a piece; a server may give less of it than it was asked for."""
        left = piece.size
        while isinstance(answer, bytes) and 0 < len(answer) <= left:
            file.write(answer)
            left -= len(answer)
            if not left:
                return
            answer = self._stream.answer(self._stream.read(piece.handle, piece.offset + piece.size - left, left))
        # The end of an empty file is a status.
        if piece.size or isinstance(answer, bytes):
            raise DeviceError(self._serial, f"pull of {piece.path}: it changed while it was read")

    def _handle(self, doing: str, path: PurePosixPath, answer: Answer) -> bytes:
        if not isinstance(answer, bytes):
            raise self._refused(doing, path, answer)
        return answer

    def _refused(self, doing: str, path: PurePosixPath, answer: Answer) -> DeviceError:
        """Return the error for a path. SFTP has no code for a full storage: the file system is asked."""
        if not isinstance(answer, SftpStatus):
            return DeviceError(self._serial, f"{doing} of {path}: answered with {type(answer).__name__}")
        if doing == "push" and answer.code != SFTP_PERMISSION_DENIED:
            for folder in path.parents:
                room = self._stream.answer(self._stream.room(os.fsencode(folder)))
                if not isinstance(room, Room):
                    continue
                if room.read_only:
                    return DeviceError(self._serial, f"{doing} of {path}: Read-only file system")
                if room.free_bytes < _FULL_BYTES or not room.has_inodes:
                    return DeviceSpaceError(self._serial, f"{doing} of {path}: No space left on device")
                break
        reason = "No such file or directory" if answer.code == SFTP_NO_SUCH_FILE else answer.text
        return DeviceError(self._serial, f"{doing} of {path}: {reason}")

    def _name(self, path: PurePosixPath) -> bytes:
        name = os.fsencode(path)
        if not path.is_absolute() or ".." in path.parts or b"\0" in name or len(name) > _PATH_BYTES:
            problem = f"{str(path)[:100]!r} cannot be a path on a device: absolute, without '..', at most 4096 bytes"
            raise DeviceError(self._serial, problem)
        return name
