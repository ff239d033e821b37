"""Result log: results that are not in the store yet, in a file that is replayed after a kill."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import msgspec

from farm.store.cluster.records import ShardResult

_HEAD = struct.Struct(">II")
"""Size and CRC-32 of the result that follows."""

_decoder = msgspec.msgpack.Decoder(ShardResult)


class ResultLog:
    """File to which results are appended. Belongs to one process, whose threads take turns.

    A result that a full disk or a loss of power cut short at the end of the file is ignored. While the disk is full,
    results wait in memory until there is space.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._left, self._end = _read(path.read_bytes())
        os.ftruncate(self._file, self._end)
        self._unwritten: list[bytes] = []
        self._open = len(self._left)

    def left(self) -> list[ShardResult]:
        """Return the results of the agent's former life, oldest first; only once."""
        left, self._left = self._left, []
        return left

    def append(self, result: ShardResult) -> bool:
        """Keep a result; return False while the disk is full, as then it is only in memory."""
        content = msgspec.msgpack.encode(result)
        self._unwritten.append(_HEAD.pack(len(content), zlib.crc32(content)) + content)
        self._open += 1
        while self._unwritten:
            try:
                self._write(self._unwritten[0])
            except OSError:
                # Remove the half-written result: results behind it could not be read.
                os.ftruncate(self._file, self._end)
                return False
            del self._unwritten[0]
        return True

    @property
    def is_empty(self) -> bool:
        """True if every result is recorded, or refused for good."""
        return self._open <= 0

    def sync(self) -> None:
        """Bring the results to the disk, where they survive a loss of power. Raises OSError."""
        os.fdatasync(self._file)

    def mark_recorded(self, count: int) -> None:
        """Note that `count` results were recorded, or refused for good."""
        self._open -= count
        if self._open <= 0:
            self._unwritten.clear()
            self.clear()

    def clear(self) -> None:
        """Remove all results from the file."""
        os.ftruncate(self._file, 0)
        self._end = self._open = 0

    def close(self) -> None:
        """Close the file, emptied if all results are recorded."""
        if self._open <= 0:
            self.clear()
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        at = self._end
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written
        self._end = at


def open_result_log(folder: Path) -> ResultLog:
    """Open the log of an agent in its folder; the log of an agent of farm 0.2.0 goes on. Raises OSError."""
    log, earlier = folder / "result_log", folder / "spool"
    if earlier.exists() and not log.exists():
        earlier.rename(log)
    return ResultLog(log)


def _read(content: bytes) -> tuple[list[ShardResult], int]:
    """Return the results in a file, and the offset behind the last whole one. Pure."""
    found, at = [], 0
    while len(content) >= at + _HEAD.size:
        size, checksum = _HEAD.unpack_from(content, at)
        data = content[at + _HEAD.size : at + _HEAD.size + size]
        if len(data) < size or zlib.crc32(data) != checksum:
            break
        try:
            found.append(_decoder.decode(data))
        except msgspec.MsgspecError:
            # A result of another version of farm, which this one cannot record.
            break
        at += _HEAD.size + size
    return found, at
