"""The files of a runtime before anybody knows that they are there: what each must be, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farm.errors import ConfigError, UsageError
from farm.profiles import Soc
from farm.runtime.elf import AARCH64, HEXAGON, MACHINES, read_elf
from farm.runtime.targets import RUNNER

ANDROID_TARGET = "aarch64-android"
GET_SDK = "set QNN_SDK_ROOT to a QNN SDK from Qualcomm (Qualcomm AI Engine Direct)"


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a file, and the one thing to do about it."""

    problem: str
    repair: str
    brief: str = "wrong"
    """The problem in a word or two."""


class Part(msgspec.Struct, frozen=True):
    """One file of a runtime."""

    name: str
    """Path on the device, relative to the runtime folder."""
    path: Path | None
    """Where it is, or where it is looked for; None where there is no place to look."""
    machine: int
    """e_machine that it must have."""
    get: str
    """How to get it."""
    skel_arch: int = 0
    """Hexagon architecture that it must be for; 0 for any."""
    soc: str = ""
    """The SoC that asks for that architecture."""
    signed: bool = False
    absent: str = "missing"
    """What to call it when it is not there."""


def find_fault(part: Part) -> Fault | None:
    """Return what is wrong with the file, None when nothing is."""
    if part.path is None or not part.path.is_file():
        looked = f" (looked for {part.path})" if part.path else ""
        return Fault(f"{part.name} is {part.absent}{looked}", part.get, part.absent)
    try:
        header = read_elf(part.path)
    except ConfigError as error:
        return Fault(error.problem, part.get, "damaged")
    if header.machine != part.machine:
        problem = f"is made for {header.machine_name}, expected {MACHINES[part.machine]}"
        return Fault(problem, part.get, "wrong CPU")
    if part.skel_arch and header.hexagon_arch != part.skel_arch:
        problem = (
            f"is a skel for V{header.hexagon_arch} (e_flags {header.flags:#x}), {part.soc} needs V{part.skel_arch}"
        )
        return Fault(problem, "the SDK's files are mixed up; unpack it again", "wrong arch")
    if part.signed and not header.signed:
        return Fault("is not signed and LPAI loads signed skels only", signing(part.path.parent.parent), "unsigned")
    return None


def made_for(path: Path) -> str:
    """Return what an ELF file is for, in a word or two; "" for what is no ELF file."""
    try:
        header = read_elf(path)
    except (UsageError, OSError):
        return ""
    return f"Hexagon V{header.hexagon_arch}" if header.machine == HEXAGON else header.machine_name


# ExecuTorch 1.5, examples/qualcomm/utils.py: what SimpleADB pushes for each backend.


def android_parts(
    soc: Soc,
    backend: str,
    sdk_root: Path | None,
    runner: Path | None,
    backend_library: Path | None,
) -> tuple[Part, ...]:
    """Return what an Android device with `soc` needs to run bundles of `backend`; None is what nobody has told.

    The runner comes first, then the backend library.
    """
    parts = [
        Part(
            runner.name if runner else RUNNER,
            runner,
            AARCH64,
            "set android_runner in the [qnn] table of farm.toml (docs/runtime.md)",
        ),
        Part(
            backend_library.name if backend_library else "libqnn_executorch_backend.so",
            backend_library,
            AARCH64,
            "set android_backend_library in the [qnn] table of farm.toml (docs/runtime.md)",
        ),
    ]
    if backend == "xnnpack":
        # The runner has it linked in; it may still want the QNN backend that it was linked with.
        return tuple(parts) if backend_library else (parts[0],)
    libraries = sdk_root / "lib" / ANDROID_TARGET if sdk_root else None
    get = f"{GET_SDK} with {ANDROID_TARGET} libraries"
    names = ("libQnnSystem.so", *_libraries(soc, backend))
    parts += [Part(name, libraries / name if libraries else None, AARCH64, get) for name in names]
    if backend == "htp":
        name = f"libQnnHtpV{soc.htp_arch}Skel.so"
        path = sdk_root / "lib" / f"hexagon-v{soc.htp_arch}" / "unsigned" / name if sdk_root else None
        parts.append(Part(name, path, HEXAGON, get, skel_arch=soc.htp_arch, soc=soc.name))
    if backend == "lpai":
        folder = sdk_root / "lib" / f"lpai-v{soc.lpai_version}" if sdk_root else None
        name = "libQnnLpaiSkel.so"
        path = folder / "signed" / name if folder else None
        parts.append(Part(name, path, HEXAGON, signing(folder) if folder else get, signed=True))
    return tuple(parts)


def _libraries(soc: Soc, backend: str) -> tuple[str, ...]:
    if backend == "htp":
        return ("libQnnHtp.so", f"libQnnHtpV{soc.htp_arch}Stub.so", "libQnnHtpPrepare.so")
    if backend == "gpu":
        return ("libQnnGpu.so",)
    return ("libQnnLpai.so", "libQnnLpaiStub.so")


def signing(folder: Path) -> str:
    """Return the command that signs the skel of an `lpai-vN` folder of an SDK."""
    return (
        "sign the skel with the Hexagon SDK: $HEXAGON_SDK_ROOT/tools/elfsigner/elfsigner.py "
        f"-i {folder / 'unsigned' / 'libQnnLpaiSkel.so'} -o {folder / 'signed'}"
    )
