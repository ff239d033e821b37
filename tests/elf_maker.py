"""ELF files as far as headers go, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable

ElfMaker = Callable[..., bytes]

LOAD = (1, 5)
HEADERS = (0, 7 << 24)
HASH = (0, 2 << 24)
UNSIGNED = (LOAD,)
SIGNED = (HEADERS, HASH, LOAD)
_SIGNATURE = b"stub of a hash table and a certificate chain"


def make_elf(
    machine: int,
    flags: int = 0,
    *,
    wide: bool = False,
    segments: tuple[tuple[int, int], ...] = UNSIGNED,
    align: int = 0,
) -> bytes:
    """A header and program headers; a segment of hashes has bytes behind it, the others have none."""
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    size, entry = (64, 56) if wide else (52, 32)
    header = struct.pack(
        "<HHI" + ("QQQ" if wide else "III") + "IHHHHHH",
        *(3, machine, 1, 0, size, 0, flags, size, entry, len(segments), 0, 0, 0),
    )
    table, end = b"", size + entry * len(segments)
    for kind, segment_flags in segments:
        offset, nbytes = (end, len(_SIGNATURE)) if (kind, segment_flags) == HASH else (0, 0)
        fields = (
            (kind, segment_flags, offset, 0, 0, nbytes, 0, align)
            if wide
            else (kind, offset, 0, 0, nbytes, 0, segment_flags, align)
        )
        table += struct.pack("<II6Q" if wide else "<8I", *fields)
    return ident + header + table + (_SIGNATURE if HASH in segments else b"")
