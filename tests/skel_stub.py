"""Builds the stub of a DSP that checks skels in front of a QNN library, and makes skels and devices for it."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from elf_maker import HASH, LOAD, SIGNED, UNSIGNED, make_elf
from heap_sdk_stub import make_sdk_with

from farm.builds.runtime.parts import HEXAGON
from farm.builds.runtime.qnn_sdk import LIBRARY, package_libraries

STUB = Path(__file__).parent / "native_runner" / "skel_stub.cpp"
AUDIO, COMPUTE = 0, 3
"""Process domains: signed, of the audio DSP, and unsigned, of the compute DSP."""
_TESTSIG = "vendor/lib/rfsa/adsp/testsig.so"
_UNSIGNED_SHELL = "vendor/dsp/cdsp/fastrpc_shell_unsigned_3"
_CODE = b"stub of a skel's code"


def build_skel_stub(output: Path, behind: Path, skel: str, domain: int) -> None:
    """Build the stub as the library `output`, in front of the library `behind`, for a file `skel` in a domain."""
    defines = (f'-DSTUB_HTP_LIBRARY="{behind}"', f'-DSTUB_SKEL="{skel}"', f"-DSTUB_DOMAIN={domain}")
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-z,nodelete",
         f"-Wl,-soname,{output.name}", *defines, "-o", str(output), str(STUB), "-ldl"],
        check=True, timeout=120,
    )  # fmt: skip


def make_skel_sdk(root: Path, arch: int) -> Path:
    """Return an SDK in the new folder `root` whose HTP of Hexagon `arch` runs with its skel in an unsigned domain."""
    name = f"libQnnHtpV{arch}Skel.so"
    library = root.with_name(f"{root.name}-library") / LIBRARY
    library.parent.mkdir()
    build_skel_stub(library, package_libraries(None)[0] / LIBRARY, name, COMPUTE)
    make_sdk_with(root, library)
    _write(root / f"lib/hexagon-v{arch}/unsigned/{name}", make_skel(int(str(arch), 16), None))
    return root


def make_skel(arch: int, key: bytes | None) -> bytes:
    """Return a skel for a Hexagon, signed with `key`, or unsigned."""
    signature = struct.pack("<Q", _checksum(key + _CODE)) if key is not None else b""
    contents = {HASH: signature, LOAD: _CODE}
    return make_elf(HEXAGON, arch, segments=SIGNED if key is not None else UNSIGNED, contents=contents)


def trust(device: Path, key: bytes) -> None:
    """Let the virtual device with files in `device` check signatures with `key`."""
    _write(device / _TESTSIG, key)


def allow_unsigned(device: Path) -> None:
    """Give the virtual device with files in `device` unsigned process domains."""
    _write(device / _UNSIGNED_SHELL, b"stub of a shell")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _checksum(text: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value
