"""Files of a device: a tar archive through the pipes of a program there, its least speed, and the free space."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from farm.base import files
from farm.base.errors import DeviceError, DeviceSpaceError, DeviceTimeoutError, LocalError
from farm.base.text import clean_text, count_of, says_full

# Files of this machine that a transfer reads and writes: never seen half written, and their errors are the farm's.


_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_LIMITS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


def local_error(error: OSError, path: Path | None = None) -> LocalError:
    """Return an OSError of this machine's files, memory or processes as a LocalError that names the file."""
    where = path or error.filename
    problem = error.strerror or str(error)
    return LocalError(
        f"this machine: {f'{where}: ' if where else ''}{problem}",
        cause="disk" if error.errno in _DISK else "local",
        is_general=error.errno in _DISK | _LIMITS,
    )


@contextlib.contextmanager
def local_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a LocalError that names `path`."""
    try:
        yield
    except OSError as error:
        raise local_error(error, path) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the place of `path` when the block ends well, and is gone when it does not."""
    with local_errors(path), files.replacing(path, mode=0o600) as file:
        yield file


# Least speed of files: a device that drips is of no use.


BYTES_PER_SECOND = 64 * 1024
"""Least average speed of a transfer: a twentieth of USB 1, and reachable through a slow network's tunnel."""

# For what takes time and moves nothing: as many stalls as are let pass, and opening and closing a file.
_STALLS = 4
_FILE_SECONDS = 1.0


class MinThroughput:
    """The time that one transfer has: some for itself and for each file, and more with every byte that has moved."""

    def __init__(self, serial: str, files: int, stall_s: float) -> None:
        """`stall_s` is how long the device may move nothing at once."""
        self._serial, self._stall_s = serial, stall_s
        self._started = time.monotonic()
        self._allowed_s = _STALLS * stall_s + files * _FILE_SECONDS
        self._bytes = 0

    def moved(self, size: int) -> None:
        """Note that so many bytes came or went. Raises DeviceTimeoutError when the transfer is too slow."""
        self._bytes += size
        seconds = time.monotonic() - self._started
        if seconds > self._allowed_s + self._bytes / BYTES_PER_SECOND:
            rate = f"{BYTES_PER_SECOND // 1024} KiB/s"
            problem = f"moved {self._bytes} bytes of files in {seconds:.0f} s, at least {rate} is expected"
            raise DeviceTimeoutError(self._serial, f"{problem}: check its cable or network")

    def stalled(self) -> DeviceTimeoutError:
        """Return the error for a device that moved nothing for as long as it may."""
        problem = f"moved no byte of a file for {self._stall_s:g} s: check its cable or network, and its storage"
        return DeviceTimeoutError(self._serial, problem)


# Free space of a device: the shell code that asks for it, and the reader of its output.


# Two programs: busybox's `df` fails on the root file system of an initramfs; some versions of `stat` lack -f.
TELL_ROOM = "df -kP . 2>/dev/null | tail -n 1; stat -f -c 'blocks %a %S' . 2>/dev/null"
"""Shell code, run in the folder in question; `free_bytes` reads its output."""

_MOST_BYTES = 1 << 60


def free_bytes(lines: Iterable[str]) -> int | None:
    """Return the free bytes in the output of TELL_ROOM; None for an implausible output. Pure."""
    for line in lines:
        words = line.split()
        # Columns of `df`: file system (may contain blanks), size, used, available, share, place.
        if words[:1] == ["blocks"] and len(words) == 3:
            count, unit = count_of(words[1]), count_of(words[2])
        else:
            count, unit = (count_of(words[-3]) if len(words) >= 6 else None), 1024
        if count is not None and unit is not None and count * unit <= _MOST_BYTES:
            return count * unit
    return None


# Files of a device as a tar archive, through the pipes of a program there.
#
# A command moves any number of files. The device's `tar` reads or writes the archive; GNU's and busybox's were tried.


if TYPE_CHECKING:
    from farm.devices.process import Link, Process

    Starter = Callable[[Sequence[str]], Process]

# -p: modes are independent of the umask; -m: a file gets the time at which it arrives. The rest of the input is read
# after a failure as well: a program that ends while its input is being ended may take its SSH connection along.
_EXTRACT = 'export LC_ALL=C; tar -x -p -m -f - -C /; code=$?; cat >/dev/null; exit "$code"'
# Only regular files are opened: a pipe without a writer would be waited for. GNU's tar reads `\101` in a name as `A`,
# which is another file; busybox' takes names as they are and knows no such option.
_CREATE = r"""
export LC_ALL=C literal=
case "$*" in *\\*) if tar --no-unquote --version >/dev/null 2>&1; then literal=--no-unquote; fi ;; esac
cd / || exit
for file do
    if [ ! -e "$file" ]; then problem="No such file or directory"
    elif [ ! -f "$file" ]; then problem="not a regular file"
    elif [ ! -r "$file" ]; then problem="Permission denied"
    else continue; fi
    echo "/$file: $problem" >&2
    exit 1
done
exec tar -c -h -f - $literal -- "$@"
"""
# GNU tar's words for a full storage that took a part.
_SHORT = "Wrote only"

_BLOCK = 512
_CHUNK = 256 * 1024
_BUFFER = 64 * 1024
# No reader leaves so much behind: an archive ends with some KiB of zeros.
_MOST_UNREAD = 4 * _CHUNK
# Linux' PATH_MAX.
_PATH_BYTES = 4096
# Bytes of quoted names in one command, which SSH quotes again.
_NAMES_BYTES = 30_000
# Seconds until the next look whether more can be sent: no transport has an event for it.
_SEND_SECONDS = 0.002
_STDERR_BYTES = 4096
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
# Entries before the entry of a file: its long name, and the long name of the file that it is a link to.
_MOST_BEFORE = 2


class _Program:
    """Program that reads or writes an archive, and may not stall or drip."""

    def __init__(self, process: Process, serial: str, stall_s: float, files: int) -> None:
        self._process, self.serial, self._stall_s = process, serial, stall_s
        self._throughput = MinThroughput(serial, files, stall_s)
        self._moved_s = time.monotonic()
        self._received = bytearray()
        self.stderr = b""
        self.code: int | None = None
        self.close, self.close_stdin = process.close, process.close_stdin

    def write(self, data: bytes) -> None:
        """Send data, unless the program has ended; little of it is unsent when this returns."""
        if self.code is None:
            self._process.send(data)
        while self.code is None and self._process.unsent > _CHUNK:
            self._move(_SEND_SECONDS)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end of the output."""
        while len(self._received) < size and self.code is None:
            self._move(self._stall_s)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def wait(self) -> None:
        """Wait for the end of the program."""
        while self.code is None:
            self._move(_SEND_SECONDS if self._process.unsent else self._stall_s)

    def _move(self, timeout_s: float) -> None:
        before = self._process.unsent
        output = self._process.receive(timeout_s)
        self._received += output.stdout
        self.stderr = (self.stderr + output.stderr)[-_STDERR_BYTES:]
        self.code = output.code
        if moved := before - self._process.unsent + len(output.stdout):
            self._throughput.moved(moved)
            self._moved_s = time.monotonic()
            if len(self._received) > _MOST_UNREAD:
                raise DeviceError(
                    self.serial, "its tar prints more than files: does a login script there print something?"
                )
        elif self.code is None and time.monotonic() >= self._moved_s + self._stall_s:
            raise self._throughput.stalled()


def push_archive(
    start: Starter, serial: str, stall_s: float, files: Mapping[PurePosixPath, Path | bytes | Link]
) -> None:
    """Write files, as `Transport.push` does."""
    names = [_name(path, serial) for path in files]
    if not files:
        return
    with contextlib.closing(_Program(start(["sh", "-c", _EXTRACT]), serial, stall_s, len(files))) as program:
        # A stream of tarfile needs `write` alone.
        stream: Any = program
        with tarfile.open(None, "w|", stream, _BUFFER, format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
            for name, source in zip(names, files.values(), strict=True):
                _add(archive, name, source)
        program.close_stdin()
        program.wait()
    if program.code:
        raise _push_failure(program, list(files))


def pull_archive(
    start: Starter,
    serial: str,
    stall_s: float,
    files: Mapping[PurePosixPath, Path],
    limits: Mapping[PurePosixPath, int],
) -> None:
    """Read files, as `Transport.pull` does."""
    batches = deque(_batches(files))
    while batches:
        paths = batches.popleft()
        argv = ["sh", "-c", _CREATE, "sh", *(_name(path, serial) for path in paths)]
        with contextlib.closing(_Program(start(argv), serial, stall_s, len(paths))) as program:
            linked = [path for path in paths if not _receive(program, path, files[path], limits[path])]
            program.wait()
        if program.code:
            # The end of a file that could not be read is zeros.
            for path in paths:
                files[path].unlink(missing_ok=True)
            raise DeviceError(serial, f"pull of {paths[0]}: {clean_text(program.stderr)}")
        if linked == paths:
            raise DeviceError(serial, f"pull of {paths[0]}: its tar sends no file, but a link")
        # An archive has one file of several names once. A name alone in its archive is no link.
        batches.extend([path] for path in linked)


def _add(archive: tarfile.TarFile, name: str, source: Path | bytes | Link) -> None:
    """Add a file or a link to an archive. Raises LocalError."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(source, bytes):
        entry.size = len(source)
        archive.addfile(entry, io.BytesIO(source))
    elif isinstance(source, Path):
        with local_errors(source), source.open("rb") as file:
            status = os.fstat(file.fileno())
            entry.mode = 0o755 if status.st_mode & 0o111 else 0o644
            entry.size = status.st_size
            archive.addfile(entry, file)
    else:
        entry.type, entry.linkname = tarfile.SYMTYPE, str(source.target)
        archive.addfile(entry)


def _receive(program: _Program, path: PurePosixPath, target: Path, limit: int) -> bool:
    """Write the next file of an archive into `target`; return False for a link to an earlier file of the archive."""
    serial = program.serial
    entry = _next_entry(program, path)
    for _ in range(_MOST_BEFORE):
        if entry.type in (*_FILES, tarfile.LNKTYPE):
            break
        program.read(min(entry.size + -entry.size % _BLOCK, 4 * _PATH_BYTES))
        entry = _next_entry(program, path)
    if entry.type == tarfile.LNKTYPE:
        return False
    if entry.type not in _FILES:
        raise DeviceError(serial, f"pull of {path}: its tar sends no file, but {entry.type!r}")
    if entry.size > limit:
        raise DeviceError(serial, f"pull of {path}: it has more than the {limit} bytes it may have")
    left = entry.size
    with replacing(target) as file:
        while left and (data := program.read(min(left, _CHUNK))):
            file.write(data)
            left -= len(data)
        if left or len(program.read(-entry.size % _BLOCK)) != -entry.size % _BLOCK:
            raise DeviceError(serial, f"pull of {path}: {clean_text(program.stderr) or 'its tar ended in the middle'}")
    return True


def _next_entry(program: _Program, path: PurePosixPath) -> tarfile.TarInfo:
    try:
        entry = tarfile.TarInfo.frombuf(program.read(_BLOCK), "utf-8", "surrogateescape")
        if entry.size < 0:
            raise ValueError("a negative size")
    except (tarfile.TarError, ValueError) as error:
        reason = clean_text(program.stderr).removeprefix(f"{path}: ")
        problem = reason or f"its tar cannot be understood ({error}); does a login script there print something?"
        raise DeviceError(program.serial, f"pull of {path}: {problem}", code=program.code) from None
    return entry


def _batches(paths: Iterable[PurePosixPath]) -> Iterator[list[PurePosixPath]]:
    """Yield `paths` in parts that are short enough for a command."""
    batch: list[PurePosixPath] = []
    size = 0
    for path in paths:
        length = len(shlex.quote(str(path)))
        if batch and size + length > _NAMES_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += length
    if batch:
        yield batch


def _push_failure(program: _Program, paths: Sequence[PurePosixPath]) -> DeviceError:
    """Return the error of a `tar` that failed, for the first file that it names."""
    text = clean_text(program.stderr, _STDERR_BYTES, lines=True)
    named = ((path, line) for line in text.splitlines() for path in paths if str(path)[1:] in line)
    path, line = next(named, (paths[0], text))
    if says_full(text) or _SHORT in text:
        return DeviceSpaceError(program.serial, f"push of {path}: No space left on device: remove files there")
    return DeviceError(program.serial, f"push of {path}: {clean_text(line) or 'its tar failed'}", code=program.code)


def _name(path: PurePosixPath, serial: str) -> str:
    """Return a path as an archive has it, from the root folder."""
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path) or len(os.fsencode(path)) > _PATH_BYTES:
        problem = f"{str(path)[:100]!r} cannot be a path on a device: absolute, without '..', at most 4096 bytes"
        raise DeviceError(serial, problem)
    return str(path.relative_to("/"))
