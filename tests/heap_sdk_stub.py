"""Builds the stub of a DSP whose heap can be profiled, and a QNN SDK for this machine that has it as its simulator.

`python tests/heap_sdk_stub.py FOLDER [SETTINGS]` makes an SDK to try by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from built_stub import built_stub

from farm.base.config.settings import load_config
from farm.builds.runtime.qnn_sdk import LIBRARY, TARGET, package_libraries

STUB = Path(__file__).parent / "native_runner" / "heap_stub.cpp"
IDLE_BYTES = 928212
"""Bytes of the stub's heap that are in use without any context."""


def build_heap_stub(cache: Path, settings: str = "") -> Path:
    """Return the stub in front of this machine's simulator, built once a cache; `settings` are listed in its source."""
    library = package_libraries(None)[0] / LIBRARY
    return built_stub(
        cache, "libheap_stub.so",
        *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-z,nodelete"),
        *(f'-DSTUB_HTP_LIBRARY="{library}"', f'-DSTUB_SETTINGS="{settings}"', STUB, "-ldl"),
        headers=[STUB.with_name("qnn_library_stub.h")],
    )  # fmt: skip


def make_heap_sdk(root: Path, cache: Path, settings: str = "") -> Path:
    """Return an SDK in the new folder `root`: libraries of this machine, with the stub in front of the simulator."""
    return make_sdk_with(root, build_heap_stub(cache, settings))


def make_sdk_with(root: Path, library: Path) -> Path:
    """Return an SDK in the new folder `root`: libraries of this machine, with the stub `library` as its simulator."""
    folder = root / "lib" / TARGET
    folder.mkdir(parents=True)
    for path in (path for source in package_libraries(None) for path in source.glob("*.so*")):
        if path.name != LIBRARY:
            (folder / path.name).symlink_to(path)
    (folder / LIBRARY).symlink_to(library)
    (root / "sdk.yaml").write_text("product: stub\nversion: 2.51.0.1\n")
    return root


if __name__ == "__main__":
    cache = load_config().cache_dir
    sys.stdout.write(f"{make_heap_sdk(Path(sys.argv[1]).absolute(), cache, ' '.join(sys.argv[2:]))}\n")
