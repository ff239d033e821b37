"""Many files over one stream of a shell: one round trip for all, and nothing is needed there but tar, stat and head."""

from __future__ import annotations

import io
import os
import secrets
import stat
import tarfile
import time
from typing import TYPE_CHECKING

from farm.devices.local_files import local_errors, replacing
from farm.devices.text import clean_text
from farm.devices.transport import Link
from farm.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path, PurePosixPath
    from typing import BinaryIO

    from farm.devices.ssh_process import SshProcess
    from farm.devices.transport import Process

# The largest write that tar is given at once; small files are gathered up to it.
_BLOCK = 1 << 18
_LINE_BYTES = 4096
# Of the names that one command is given.
_NAMES_BYTES = 48 * 1024
# Linux' PATH_MAX.
_PATH_BYTES = 4096

# The files get the time at which they arrive, by the device's clock, and its user as owner.
UNPACK = ("sh", "-c", "umask 022 && exec tar -xomf -")

# $1: what follows each file; then limits and files. Each is answered with a line, and its content when it is wanted.
_SEND = """
end=$1
shift
while [ $# -gt 1 ]; do
    if [ ! -e "$2" ]; then echo "no No such file or directory"
    elif [ ! -f "$2" ]; then echo "no not a regular file"
    elif [ ! -r "$2" ]; then echo "no Permission denied"
    elif size=$(stat -L -c %s -- "$2"); then
        if [ "$size" -gt "$1" ]; then echo "large $size"
        else
            echo "is $size"
            if [ "$size" -gt 0 ]; then head -c "$size" -- "$2"; fi
            echo "$end"
        fi
    else echo "no cannot be measured"
    fi
    shift 2
done
"""


def check_path(path: PurePosixPath, serial: str) -> str:
    """Return the path as text. Raises DeviceError for one that tar would not take."""
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path) or len(os.fsencode(path)) > _PATH_BYTES:
        problem = f"{str(path)[:100]!r} cannot be a path on a device: absolute, without '..', at most 4096 bytes"
        raise DeviceError(serial, problem)
    return str(path)


def write_archive(
    files: Mapping[PurePosixPath, Path | bytes | Link], write: Callable[[bytes | memoryview], None], serial: str
) -> None:
    """Give `files` to `write` as a tar archive for the root folder. Raises InfraError for an unreadable local file."""
    names = {path: check_path(path, serial).lstrip("/") for path in files}
    with tarfile.open(
        fileobj=_Outlet(write),
        mode="w|",
        bufsize=_BLOCK,
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for path, source in files.items():
            entry = tarfile.TarInfo(names[path])
            entry.mtime = int(time.time())
            if isinstance(source, Link):
                entry.type, entry.linkname = tarfile.SYMTYPE, str(source.target)
                archive.addfile(entry)
            elif isinstance(source, bytes):
                entry.size, entry.mode = len(source), 0o644
                archive.addfile(entry, io.BytesIO(source))
            else:
                with local_errors(source), source.open("rb") as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        raise OSError(0, "not a regular file")
                    entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o111 else 0o644
                    archive.addfile(entry, file)


class _Outlet(io.RawIOBase):
    """A file that only passes on."""

    def __init__(self, write: Callable[[bytes | memoryview], None]) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        self._write(view)
        return len(view)


def batches(
    files: Mapping[PurePosixPath, int], serial: str
) -> Iterator[tuple[Sequence[str], str, Sequence[PurePosixPath]]]:
    """Return commands that send files, given with their limits: each with what follows a file, and its files."""
    end = secrets.token_hex(8)
    words: list[str] = []
    paths: list[PurePosixPath] = []
    size = 0
    for path, limit in files.items():
        name = check_path(path, serial)
        if size and size + len(os.fsencode(name)) > _NAMES_BYTES:
            yield ["sh", "-c", _SEND, "sh", end, *words], end, paths
            words, paths, size = [], [], 0
        words += [str(limit), name]
        paths.append(path)
        # A limit, and what quoting adds, which is done twice: a quote becomes five bytes, and then seventeen.
        size += len(os.fsencode(name)) + 16 * name.count("'") + 48
    if paths:
        yield ["sh", "-c", _SEND, "sh", end, *words], end, paths


class Receiver:
    """Reads what such a command sends."""

    def __init__(self, process: SshProcess, serial: str, end: str, stall_s: float) -> None:
        self._process, self._serial, self._stall_s = process, serial, stall_s
        self._end = end.encode()
        self._buffer = b""

    def file(self, path: PurePosixPath, target: Path, limit: int) -> None:
        """Write the next file to `target`. Raises DeviceError, with nothing written."""
        word, _, rest = self._line(path).partition(" ")
        if word == "large":
            raise DeviceError(self._serial, f"pull of {path}: it has more than the {limit} bytes it may have")
        if word != "is" or not rest.isascii() or not rest.isdecimal() or int(rest) > limit:
            reason = rest if word == "no" else f"answered {word[:40]!r}"
            raise DeviceError(self._serial, f"pull of {path}: {reason}")
        with replacing(target) as file:
            self._copy(int(rest), file, path)
            if self._line(path) != self._end.decode():
                raise DeviceError(self._serial, f"pull of {path}: it changed while it was read")

    def _copy(self, size: int, file: BinaryIO, path: PurePosixPath) -> None:
        while size:
            if not self._buffer:
                self._more(path)
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            file.write(piece)

    def _line(self, path: PurePosixPath) -> str:
        while b"\n" not in self._buffer:
            if len(self._buffer) > _LINE_BYTES:
                raise DeviceError(self._serial, f"pull of {path}: answers with a line that does not end")
            self._more(path)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return clean_text(line)

    def _more(self, path: PurePosixPath) -> None:
        output = self._process.receive(self._stall_s)
        if output.code is not None:
            raise DeviceError(self._serial, f"pull of {path}: it ended too soon", code=output.code)
        if not output.stdout and not output.stderr:
            raise self._process.stalled(self._stall_s)
        self._buffer += output.stdout


def drain(process: Process, stall_s: float, most: int) -> tuple[int | None, bytes]:
    """Return the exit code, None when nothing comes for `stall_s`, and the first `most` bytes of standard error."""
    said = b""
    while True:
        output = process.receive(stall_s)
        said = (said + output.stderr)[:most]
        if output.code is not None or not (output.stdout or output.stderr):
            return output.code, said
