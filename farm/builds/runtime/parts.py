"""Files of a runtime, existing or not: their requirements, and the check of a file against them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from farm.base.errors import ConfigError, UsageError
from farm.builds.runtime.native.elf import AARCH64, HEXAGON, MACHINES, ElfHeader, read_elf
from farm.builds.runtime.sign_record import find_signing_fault


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
