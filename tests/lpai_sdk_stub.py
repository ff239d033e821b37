"""Makes a stub of a QNN SDK that has LPAI for this machine: its library hands everything to HTP's simulator.

`python tests/lpai_sdk_stub.py FOLDER` makes one, with which the LPAI backend can be tried by hand.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from elf_maker import SIGNED, UNSIGNED, make_elf

from farm.base.config.settings import load_config
from farm.base.socs import find_soc
from farm.builds.runtime.parts import HEXAGON
from farm.builds.runtime.qnn_sdk import LIBRARY, TARGET, host_sdk
from farm.builds.runtime.signing import adopt

SOC = "SM8850"
MOST_FPS = 20
"""Frames a second of the stub's base clock, made up: it shows what farm does with a refusal."""
STUB = Path(__file__).parent / "lpai" / "lpai_stub.cpp"


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


def make_stub_sdk(root: Path, cache: Path, *, unknown: tuple[str, ...] = ()) -> StubSdk:
    """Return an SDK made in the new folder `root`, with this machine's libraries out of farm's cache.

    The library does not take QNN's operators `unknown`, which HTP has, and refuses a real-time graph with more than
    MOST_FPS frames a second at the base clock.
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
        "STUB_MOST_FPS": str(MOST_FPS),
        "STUB_UNKNOWN_TYPES": ", ".join(f'"{name}"' for name in unknown or ("none",)),
    }
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-z,nodelete",
         "-Wl,-soname,libQnnLpai.so", *(f"-D{name}={value}" for name, value in defines.items()),
         "-o", str(sdk.library), str(STUB), "-ldl"],
        check=True, timeout=120,
    )  # fmt: skip
    for kind, segments in {"unsigned": UNSIGNED, "signed": SIGNED}.items():
        skel = sdk.skels / kind / "libQnnLpaiSkel.so"
        skel.parent.mkdir(parents=True)
        skel.write_bytes(make_elf(HEXAGON, 0x81, segments=segments))
    adopt(sdk.skels / "unsigned" / "libQnnLpaiSkel.so", sdk.skels / "signed" / "libQnnLpaiSkel.so")
    (root / "sdk.yaml").write_text("product: stub\nversion: 2.51.0.1\n")
    return sdk


if __name__ == "__main__":
    sys.stdout.write(f"{make_stub_sdk(Path(sys.argv[1]).absolute(), load_config().cache_dir).root}\n")
