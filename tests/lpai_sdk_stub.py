"""Makes a stub of a QNN SDK that has LPAI for this machine: its library hands everything to HTP's simulator.

`python tests/lpai_sdk_stub.py FOLDER` makes one, with which the LPAI backend can be tried by hand.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from farm.base.config.settings import load_config
from farm.base.socs import find_soc
from farm.builds.runtime.signing.sign import adopt
from farm.builds.runtime.simulator import LIBRARY, TARGET, host_sdk

SOC = "SM8850"
MOST_FPS = 20
"""Frames a second of the stub's base clock, made up: it shows what farm does with a refusal."""
STUB = Path(__file__).parent / "lpai" / "lpai_stub.cpp"

_HEXAGON, _ARCH = 164, 0x81
_LOAD, _PROGRAM_HEADER, _HASH = (1, 5), (0, 7 << 24), (0, 2 << 24)


@dataclass(frozen=True)
class StubSdk:
    """Stub of an SDK, and the calls that its LPAI library received."""

    root: Path
    log: Path

    @property
    def library(self) -> Path:
        return self.root / "lib" / TARGET / "libQnnLpai.so"

    @property
    def skels(self) -> Path:
        return self.root / "lib" / "lpai-v6"

    def told(self, program: str) -> list[str]:
        """Return the notes of one program, oldest first."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")]

    def forget(self) -> None:
        """Forget all notes."""
        self.log.unlink(missing_ok=True)


def make_stub_sdk(root: Path, cache: Path, *, unknown: tuple[str, ...] = (), most_fps: int = MOST_FPS) -> StubSdk:
    """Return an SDK made in the new folder `root`, with this machine's libraries out of farm's cache.

    The library does not take QNN's operators `unknown`, which HTP has, and refuses a real-time graph with more than
    `most_fps` frames a second at the base clock; 0 refuses none.
    """
    sdk = StubSdk(root, root.parent / "lpai.log")
    host = host_sdk(cache)
    libraries = root / "lib" / TARGET
    libraries.mkdir(parents=True)
    for path in host.lib_dir.iterdir():
        if path.is_symlink():
            (libraries / path.name).symlink_to(path.resolve())
    (libraries / LIBRARY).symlink_to((host.lib_dir / "real" / LIBRARY).resolve())
    defines = {
        "STUB_HTP_LIBRARY": f'"{host.lib_dir / LIBRARY}"',
        "STUB_LOG": f'"{sdk.log}"',
        "STUB_SOC_MODEL": str(find_soc(SOC).soc_id),
        "STUB_MOST_FPS": str(most_fps),
        "STUB_UNKNOWN_TYPES": ", ".join(f'"{name}"' for name in unknown or ("none",)),
    }
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-z,nodelete",
         "-Wl,-soname,libQnnLpai.so", *(f"-D{name}={value}" for name, value in defines.items()),
         "-o", str(sdk.library), str(STUB), "-ldl"],
        check=True, timeout=120,
    )  # fmt: skip
    for kind, segments in {"unsigned": [_LOAD], "signed": [_PROGRAM_HEADER, _HASH, _LOAD]}.items():
        skel = sdk.skels / kind / "libQnnLpaiSkel.so"
        skel.parent.mkdir(parents=True)
        skel.write_bytes(_skel_stub(segments))
    adopt(sdk.skels / "unsigned" / "libQnnLpaiSkel.so", sdk.skels / "signed" / "libQnnLpaiSkel.so")
    (root / "sdk.yaml").write_text("product: stub\nversion: 2.51.0.1\n")
    return sdk


def _skel_stub(segments: list[tuple[int, int]]) -> bytes:
    """A library for Hexagon, as far as headers go; every segment is the same few bytes behind them."""
    ident = b"\x7fELF" + bytes([1, 1, 1]) + bytes(9)
    header = struct.pack("<HHIIIIIHHHHHH", 3, _HEXAGON, 1, 0, 52, 0, _ARCH, 52, 32, len(segments), 0, 0, 0)
    content = b"stub, signed by nobody"
    start, size = 52 + 32 * len(segments), len(content)
    table = [struct.pack("<8I", kind, start, 0, 0, size, size, flags, 0) for kind, flags in segments]
    return ident + header + b"".join(table) + content


if __name__ == "__main__":
    sys.stdout.write(f"{make_stub_sdk(Path(sys.argv[1]).absolute(), load_config().cache_dir).root}\n")
