"""ELF files as far as headers go, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

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
    contents: Mapping[tuple[int, int], bytes] = MappingProxyType({HASH: _SIGNATURE}),
) -> bytes:
    """A header and program headers, with the `contents` of segments behind them."""
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    size, entry = (64, 56) if wide else (52, 32)
    header = struct.pack(
        "<HHI" + ("QQQ" if wide else "III") + "IHHHHHH",
        *(3, machine, 1, 0, size, 0, flags, size, entry, len(segments), 0, 0, 0),
    )
    table, content = b"", b""
    for kind, segment_flags in segments:
        data = contents.get((kind, segment_flags), b"")
        offset, nbytes = (size + entry * len(segments) + len(content), len(data)) if data else (0, 0)
        content += data
        fields = (
            (kind, segment_flags, offset, 0, 0, nbytes, 0, align)
            if wide
            else (kind, offset, 0, 0, nbytes, 0, segment_flags, align)
        )
        table += struct.pack("<II6Q" if wide else "<8I", *fields)
    return ident + header + table + content
