"""Parts of a runtime: headers of ELF files, records of signatures, and faults that are found before a device is."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from farm.base.errors import ConfigError, UsageError
from farm.base.files import replacing
from farm.base.hashes import sha256_of

# Headers of an ELF file: the machine that it was made for, architecture flags, signature.


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


# Record of a signature, in a small file beside the signed file, and the check that the two still match.
#
# A record holds names, times and hashes: no argument, no output and no file of the signing tool, which may contain
# keys.


_SUFFIX = ".farm-sign.json"
# Many times the size of a record.
_MOST_BYTES = 64 << 10
# msgspec raises the last two for strings that are no UTF-8, and for deep nesting.
_UNREADABLE = (OSError, msgspec.DecodeError, UnicodeError, RecursionError)


class SignRecord(msgspec.Struct, frozen=True):
    """User, time and tool of a signature, or the user who adopted a file that was signed elsewhere."""

    how: Literal["signed", "adopted"]
    who: str
    host: str
    when: str
    """UTC, ISO 8601."""
    tool: str
    """Path of the signing tool; "" for a file that was adopted."""
    tool_sha256: str
    input: str
    """Path of the unsigned file; "" if none was there for comparison."""
    input_sha256: str
    output_sha256: str
    schema: int = 1


def record_path(signed: Path) -> Path:
    """Return the path of the record of a signed file."""
    return signed.with_name(signed.name + _SUFFIX)


def read_record(signed: Path) -> SignRecord | None:
    """Return the record of a signed file; None if it is missing or unreadable."""
    with contextlib.suppress(*_UNREADABLE), record_path(signed).open("rb") as file:
        return msgspec.json.decode(file.read(_MOST_BYTES), type=SignRecord)
    return None


def write_record(signed: Path, record: SignRecord) -> None:
    """Write the record of a signed file, in one step. Raises OSError."""
    content = msgspec.json.format(msgspec.json.encode(record)) + b"\n"
    replace_file(record_path(signed), content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of an SDK, which may be shared, in one step. Raises OSError."""
    with replacing(path, durable=True) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)


class SigningFault(msgspec.Struct, frozen=True):
    """Reason not to use a file with a signature."""

    kind: Literal["foreign", "outdated", "wrong arch"]
    """`foreign`: no record matches the file. `outdated`: the unsigned file has changed since it was signed."""
    problem: str
    adopted: bool = False
    """True for a file that was signed elsewhere and adopted: it is replaced only on request."""


def find_signing_fault(signed: Path, unsigned: Path | None) -> SigningFault | None:
    """Return the reason not to use a file with a signature; None for a usable one.

    A missing `unsigned`, now or at the time of adoption, makes no file outdated. Raises OSError, and ConfigError for a
    file that is no ELF file.
    """
    record = read_record(signed)
    if record is None:
        name = record_path(signed).name
        return SigningFault("foreign", f"is signed, but not by 'farm setup sign': there is no {name} beside it")
    signed_on = f"{record.how} on {record.when[:10]}"
    if sha256_of(signed) != record.output_sha256:
        return SigningFault("foreign", f"is not the file that was {signed_on}: its hash is another")
    if unsigned is None or not unsigned.is_file():
        return None
    adopted = record.how == "adopted"
    if record.input_sha256 and record.input_sha256 != sha256_of(unsigned):
        return SigningFault("outdated", f"was {signed_on} from another {unsigned.name} than there is now", adopted)
    made, source = read_elf(signed), read_elf(unsigned)
    if (made.machine, made.flags) != (source.machine, source.flags):
        problem = f"has e_flags {made.flags:#x}, and its original has {source.flags:#x}"
        return SigningFault("wrong arch", problem, adopted)
    return None


# Files of a runtime, existing or not: their requirements, and the check of a file against them.


class FileFault(msgspec.Struct, frozen=True):
    """Problem of a file, and its repair."""

    problem: str
    repair: str
    brief: str = "wrong"
    """Problem in one or two words."""


class RuntimePart(msgspec.Struct, frozen=True):
    """File of a runtime with its requirements."""

    name: str
    """Path on the device, relative to the runtime folder."""
    path: Path | None
    """Expected path of the file here; None without a place to search."""
    machine: int
    """Required e_machine."""
    get: str
    """Way to get the file."""
    hexagon: int = 0
    """Hexagon architecture of the device; 0 for a file that runs on no Hexagon, or if unknown."""
    exact: bool = True
    """True for a file that needs exactly this architecture; False accepts an older one too."""
    soc: str = ""
    """SoC with that architecture."""
    signs: str = ""
    """Command that signs the file; "" for a file without a signature."""
    unsigned: Path | None = None
    """Unsigned original of a signed file."""
    absent: str = "missing"
    """Word for a missing file in messages."""

    @property
    def present(self) -> bool:
        """True if the file exists."""
        return self.path is not None and self.path.is_file()


def find_fault(part: RuntimePart) -> FileFault | None:
    """Return the fault of the file, None for a good one."""
    if part.path is None or not part.path.is_file():
        looked = f" (looked for {part.path})" if part.path else ""
        return FileFault(f"{part.name} is {part.absent}{looked}", part.get, part.absent)
    try:
        header = read_elf(part.path)
        return _find_wrong(part, header) or (_find_unsigned(part, part.path, header) if part.signs else None)
    except ConfigError as error:
        return FileFault(error.problem, part.get, "damaged")
    except OSError as error:
        return FileFault(f"cannot be read: {error.strerror}", f"make {part.path} readable for you", "unreadable")


def require_sound(parts: Iterable[RuntimePart]) -> None:
    """Raise ConfigError for the first faulty file."""
    for part in parts:
        if (fault := find_fault(part)) is not None:
            raise ConfigError(part.path or part.name, "", f"{fault.problem}: {fault.repair}")


def _find_wrong(part: RuntimePart, header: ElfHeader) -> FileFault | None:
    if header.machine != part.machine:
        problem = f"is made for {header.machine_name}, expected {MACHINES[part.machine]}"
        return FileFault(problem, part.get, "wrong CPU")
    arch = header.hexagon_arch
    if part.hexagon in (0, arch) or (not part.exact and 0 < arch < part.hexagon):
        return None
    kind = "a skel" if part.name.endswith("Skel.so") else "made"
    needs = f"V{part.hexagon}" + ("" if part.exact else " or older")
    problem = f"is {kind} for V{arch} (e_flags {header.flags:#x}), {part.soc or 'the device'} needs {needs}"
    return FileFault(problem, "the SDK's files are mixed up; unpack it again" if part.exact else part.get, "wrong arch")


def _find_unsigned(part: RuntimePart, path: Path, header: ElfHeader) -> FileFault | None:
    if not header.signed:
        return FileFault("is not signed and LPAI loads signed files only", part.get, "unsigned")
    found = find_signing_fault(path, part.unsigned)
    if found is None:
        return None
    repair = part.signs
    if found.kind == "foreign":
        repair = f"{part.signs} --adopt"
    elif found.adopted:
        repair = f"have it signed anew where it came from and run '{part.signs} --adopt', or run '{part.signs} --force'"
    return FileFault(found.problem, repair, found.kind)


def made_for(path: Path) -> str:
    """Return the processor that an ELF file is made for, in a word or two; "" for other files."""
    try:
        header = read_elf(path)
    except (UsageError, OSError):
        return ""
    return f"Hexagon V{header.hexagon_arch}" if header.machine == HEXAGON else header.machine_name


def library(name: str, path: Path | None, get: str, absent: str = "missing") -> RuntimePart:
    """Return a library or a program for the device's processor."""
    return RuntimePart(name, path, AARCH64, get, absent=absent)
