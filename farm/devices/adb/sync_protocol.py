"""adb's sync protocol, version 1 and the v2 stat records: what both ends of it share.

A message is a 4-byte id and a little-endian u32. Source: SYNC.TXT and file_sync_protocol.h of AOSP's
packages/modules/adb. Only the standard library: the daemon of a virtual device imports this at its start.
"""

from __future__ import annotations

import os
import struct

MESSAGE = struct.Struct("<4sI")
# mode, size, mtime
STAT_V1 = struct.Struct("<4s3I")
# mode, size, mtime, length of the name
ENTRY_V1 = struct.Struct("<4s4I")
# error, device, inode, mode, links, uid, gid, size, atime, mtime, ctime
STAT_V2 = struct.Struct("<4sI2Q4IQ3q")
# the same, and the length of the name
ENTRY_V2 = struct.Struct("<4sI2Q4IQ3qI")

# SYNC_DATA_MAX: a peer may hang up on more.
DATA_BYTES = 64 * 1024
# adbd refuses longer ones.
PATH_BYTES = 1024
# As many DATA messages as fit into one packet of 1 MiB.
_FRAMES = 15


class DataFrames:
    """Reads a file as DATA messages, many at a time and without copying. The buffer is used again."""

    def __init__(self) -> None:
        frame = MESSAGE.size + DATA_BYTES
        self._buffer = memoryview(bytearray(frame * _FRAMES))
        self._slots = [self._buffer[n * frame + MESSAGE.size : (n + 1) * frame] for n in range(_FRAMES)]
        for n in range(_FRAMES):
            MESSAGE.pack_into(self._buffer, n * frame, b"DATA", DATA_BYTES)

    def read(self, file: int) -> memoryview:
        """Return the next messages, valid until the next call; empty at the end of the file."""
        size = os.readv(file, self._slots)
        full, rest = divmod(size, DATA_BYTES)
        end = full * (MESSAGE.size + DATA_BYTES)
        if not rest:
            return self._buffer[:end]
        last = bytearray(self._buffer[end : end + MESSAGE.size + rest])
        MESSAGE.pack_into(last, 0, b"DATA", rest)
        if not full:
            return memoryview(last)
        return memoryview(bytes(self._buffer[:end]) + last)
