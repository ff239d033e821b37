"""C++ stubs of the tests, compiled once a cache."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from farm.base.files import published
from farm.builds.runtime.packages import package_folder, package_version

SOURCES = Path(__file__).parent / "native_runner"


def built_stub(cache: Path, output: str, *words: str | Path, headers: Iterable[Path] = ()) -> Path:
    """Return the file `output` that the compiler makes of these words, which name the sources."""
    argv = ["c++", *map(str, words)]
    texts = [path.read_text() for path in (*(Path(word) for word in argv if word.endswith(".cpp")), *headers)]
    key = hashlib.sha256("\0".join((*texts, *argv, output)).encode()).hexdigest()[:16]

    def compile_into(folder: Path) -> None:
        subprocess.run([*argv, "-o", str(folder / output)], check=True, timeout=300)

    return published(cache / "runner-test-stubs" / key, compile_into) / output


def executorch_flags() -> list[str]:
    """Return the flags for sources that include ExecuTorch's headers; its version is a part of the stub's key."""
    include = package_folder("executorch", "include", "build") / "include"
    defines = ("C10_USING_CUSTOM_GENERATED_MACROS", "ET_EVENT_TRACER_ENABLED", f"OF={package_version('executorch')}")
    folders = (include, include / "executorch/runtime/core/portable_type/c10")
    return ["-std=c++17", *(f"-D{name}" for name in defines), *(f"-I{folder}" for folder in folders)]


def qnn_stub(cache: Path, core_minor: int) -> Path:
    """Return a stub of QNN's library for the HTP with a version of the core API."""
    flags = ("-shared", "-fPIC", f"-DCORE_MINOR={core_minor}")
    return built_stub(cache, "libQnnHtp.so", *flags, SOURCES / "qnn_stub.cpp")
