"""ELF headers and a folder that looks like a QNN SDK, as far as the runtime looks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

ElfMaker = Callable[..., bytes]

LOAD = (1, 5)
HASH = (0, 2 << 24)


def make_elf(
    machine: int, flags: int = 0, *, wide: bool = False, segments: tuple[tuple[int, int], ...] = (LOAD,)
) -> bytes:
    """A header and program headers, with nothing behind them."""
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    size, entry = (64, 56) if wide else (52, 32)
    header = struct.pack(
        "<HHI" + ("QQQ" if wide else "III") + "IHHHHHH",
        *(3, machine, 1, 0, size, 0, flags, size, entry, len(segments), 0, 0, 0),
    )
    table = b""
    for kind, segment_flags in segments:
        fields = (kind, segment_flags, *[0] * 6) if wide else (kind, *[0] * 5, segment_flags, 0)
        table += struct.pack("<II6Q" if wide else "<8I", *fields)
    return ident + header + table


@pytest.fixture
def elf() -> ElfMaker:
    return make_elf


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """A stub of an SDK for Android, complete for SM8650 (V75) and for the LPAI of SM8850 (v6)."""
    root = tmp_path / "stub-sdk"
    libraries = root / "lib" / "aarch64-android"
    libraries.mkdir(parents=True)
    for name in ("System", "Htp", "HtpPrepare", "HtpV75Stub", "HtpV81Stub", "Gpu", "Lpai", "LpaiStub"):
        (libraries / f"libQnn{name}.so").write_bytes(make_elf(183, wide=True) + name.encode())
    for arch in (75, 81):
        skel = root / "lib" / f"hexagon-v{arch}" / "unsigned" / f"libQnnHtpV{arch}Skel.so"
        skel.parent.mkdir(parents=True)
        skel.write_bytes(make_elf(164, int(str(arch), 16)))
    for kind, segments in {"unsigned": (LOAD,), "signed": ((0, 7 << 24), HASH, LOAD)}.items():
        lpai = root / "lib" / "lpai-v6" / kind / "libQnnLpaiSkel.so"
        lpai.parent.mkdir(parents=True)
        lpai.write_bytes(make_elf(164, 0x81, segments=segments))
    (root / "sdk.yaml").write_text("product: stub\nversion: 2.40.0.1\n")
    for name in ("qnn_executor_runner", "libqnn_executorch_backend.so"):
        (root / name).write_bytes(make_elf(183, wide=True) + name.encode())
    return root
