"""Headers of an ELF file: the machine that it was made for, architecture flags, signature."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from farm.base.errors import ConfigError

# ELF specification, e_machine.
MACHINES = {3: "x86", 40: "Arm", 62: "x86-64", 164: "Hexagon DSP6", 183: "AArch64"}
HEXAGON = 164
AARCH64 = 183
X86_64 = 62

_PT_NULL = 0
_PT_LOAD = 1
# Bits of e_flags that name the architecture: LLVM, EF_HEXAGON_MACH without the variant bit of the tiny cores.
_HEXAGON_ARCH = 0x3FF
# Bits of p_flags for the type of a segment in Qualcomm's signed images: Linux, drivers/soc/qcom/mdt_loader.c.
_SEGMENT_TYPE = 7 << 24
_SEGMENT_HASH = 2 << 24
# Versions of symbols as GNU ld writes them into .dynstr; private ones (GLIBC_PRIVATE) have no number.
_VERSION = re.compile(rb"\0(GLIBCXX|GLIBC)_(\d+(?:\.\d+)+)(?=\0)")
# No library has as many: a larger number is a damaged header.
_MOST_SEGMENTS = 512


class ElfSegment(NamedTuple):
    """Program header: type, flags and alignment of a segment, and its bytes in the file."""

    kind: int
    flags: int
    offset: int
    nbytes: int
    align: int


class ElfHeader(msgspec.Struct, frozen=True):
    """Header of an ELF file."""

    machine: int
    flags: int
    segments: tuple[ElfSegment, ...]
    file_bytes: int

    @property
    def machine_name(self) -> str:
        """Name of the machine, or its number."""
        return MACHINES.get(self.machine, f"machine {self.machine}")

    @property
    def hexagon_arch(self) -> int:
        """Hexagon architecture in its usual notation: 75 for V75, with e_flags 0x75."""
        text = f"{self.flags & _HEXAGON_ARCH:x}"
        return int(text) if text.isdecimal() else 0

    @property
    def page_bytes(self) -> int:
        """Largest size of memory pages that the file can be loaded with; 0 for a file without loadable segments."""
        return min((one.align for one in self.segments if one.kind == _PT_LOAD), default=0)

    @property
    def signed(self) -> bool:
        """True for a complete segment of hashes, as in Qualcomm's signed images.

        Only a device can verify the hashes and certificates in it.
        """
        return any(
            one.kind == _PT_NULL
            and one.flags & _SEGMENT_TYPE == _SEGMENT_HASH
            and 0 < one.nbytes <= self.file_bytes - one.offset
            for one in self.segments
        )


def read_elf(path: Path) -> ElfHeader:
    """Return the header of a little-endian ELF file, 32 or 64 bits. Raises ConfigError, OSError."""
    with path.open("rb") as file:
        start = file.read(64)
        if len(start) < 52 or start[:4] != b"\x7fELF" or start[4] not in {1, 2} or start[5] != 1:
            raise ConfigError(path, "", "is no little-endian ELF file")
        wide = start[4] == 2
        try:
            (machine,) = struct.unpack_from("<H", start, 18)
            (table,) = struct.unpack_from("<Q" if wide else "<I", start, 32 if wide else 28)
            (flags,) = struct.unpack_from("<I", start, 48 if wide else 36)
            size, count = struct.unpack_from("<HH", start, 54 if wide else 42)
            least = 56 if wide else 32
            file_bytes = os.fstat(file.fileno()).st_size
            if count > _MOST_SEGMENTS or table > file_bytes or (count and size < least):
                raise ConfigError(path, "", "is an ELF file with a damaged header")
            file.seek(table)
            headers = file.read(size * count)
            segments = tuple(_segment(headers, size * i, wide=wide) for i in range(count))
        except (struct.error, OverflowError, ValueError):
            raise ConfigError(path, "", "is an ELF file that is cut short") from None
    return ElfHeader(machine, flags, segments, file_bytes)


def _segment(headers: bytes, start: int, *, wide: bool) -> ElfSegment:
    if wide:
        kind, flags, offset, _, _, nbytes, _, align = struct.unpack_from("<II6Q", headers, start)
    else:
        kind, offset, _, _, nbytes, _, flags, align = struct.unpack_from("<8I", headers, start)
    return ElfSegment(kind, flags, offset, nbytes, align)


def required_versions(files: Iterable[Path]) -> dict[str, str]:
    """Return the newest version of glibc (`GLIBC`) and of libstdc++ (`GLIBCXX`) that any of the files needs.

    The versions are read from the strings of the files, so that libraries which define such versions give wrong ones.
    """
    newest: dict[str, tuple[int, ...]] = {}
    for path in files:
        for name, text in _VERSION.findall(path.read_bytes()):
            version = tuple(int(part) for part in text.split(b"."))
            newest[name.decode()] = max(newest.get(name.decode(), ()), version)
    return {name: ".".join(map(str, version)) for name, version in sorted(newest.items())}
