"""Record of a signature, in a small file beside the signed file, and the check that the two still match.

A record holds names, times and hashes: no argument, no output and no file of the signing tool, which may contain keys.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from farm.base.atomic import replacing
from farm.base.hashes import sha256_of
from farm.builds.runtime.native.elf import read_elf

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
