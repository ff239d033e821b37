"""ExecuTorch's C++ for this machine, shipped by the toolchain or, without one, by farm's environment."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import MissingToolError, UsageError
from farm.base.hashes import digest_of, hash_files
from farm.base.text import one_line
from farm.builds.runtime.native.targets import HOST
from farm.builds.runtime.packages import package_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.base.config.settings import Config

_CONFIG = "executorch-config.cmake"
_RUNTIME = Path("lib/libexecutorch.so")
# Folders of the CMake package: in a wheel, and below an install prefix (CMake's default, then of older versions).
_IN_WHEEL = Path("share/cmake")
IN_PREFIX = (Path("lib/cmake/ExecuTorch"), Path("share/cmake"))
_VERSION = re.compile(r"""^__version__\s*(?::\s*\w+\s*)?=\s*["']([\w.+-]{1,80})["']""", re.MULTILINE)
_CMAKE_VERSION = re.compile(r'^set\(PACKAGE_VERSION "([\w.+-]{1,80})"\)', re.MULTILINE)
# Suffixes of the files that a compiler or a linker reads from a package.
_HEADERS = frozenset({".h", ".hpp", ".inc", ".ipp"})
_LINKED = frozenset({".a", ".so", ".cmake"})


class NativeExecutorch(msgspec.Struct, frozen=True):
    """ExecuTorch that the native runner is compiled, linked and run with."""

    root: Path
    """The `executorch` package of an environment, or an install prefix."""
    package: Path
    """Folder of its CMake package."""
    version: str
    """Version of the package; empty if its files name none."""
    shared: bool
    """True for shared libraries, which must lie beside the runner; a prefix is linked statically."""
    headers: Path | None = None
    """Folder with the profiler's headers, which a prefix lacks."""
    own: bool = True
    """True for the toolchain's own C++, False for the substitute from farm's environment."""

    @property
    def libraries(self) -> Path:
        """Folder of the libraries."""
        return self.root / "lib"

    def identity(self, cache_dir: Path) -> str:
        """Return the hash of headers and libraries; copies in other folders have the same hash."""
        more = content_of(cache_dir, self.headers.parent) if self.headers else ""
        return content_of(cache_dir, self.root) + more


def content_of(cache_dir: Path, root: Path) -> str:
    """Return the hash of the headers, libraries and CMake files below `root`, an ExecuTorch package or prefix."""
    files = sorted(_files(root))
    hashes = hash_files(cache_dir, files)
    return digest_of((path.relative_to(root), hashes[path]) for path in files)


def runner_executorch(config: Config) -> NativeExecutorch:
    """Return the ExecuTorch for this machine's native runner, by the toolchain that `config` has selected.

    The first of these is taken: the build folder or prefix that the toolchain names for this machine, the C++ in its
    package (wheels from 1.5), the C++ of farm's environment. Raises UsageError for a folder without ExecuTorch, and
    MissingToolError if all of them are missing.
    """
    toolchain = config.toolchain
    if (named := toolchain.native.get(HOST)) is not None:
        return _prefix(named, f"toolchain.{toolchain.name}: native.{HOST}", toolchain.executorch)
    if toolchain.executorch is not None and (found := _wheel(toolchain.executorch)):
        return found
    try:
        default = default_executorch()
    except MissingToolError as error:
        if toolchain.executorch is None:
            raise
        raise MissingToolError(
            f"the toolchain {one_line(toolchain.name or str(toolchain.executorch), 200)} ships no C++ runtime of "
            f"ExecuTorch to build the runner with, and farm's own environment has none: {error}"
        ) from None
    return msgspec.structs.replace(default, own=toolchain.executorch is None)


def default_executorch() -> NativeExecutorch:
    """Return the C++ of the executorch package in farm's environment. Raises MissingToolError."""
    root = package_folder("executorch", str(_RUNTIME), "build")
    if (found := _wheel(root)) is None:
        raise MissingToolError(f"the Python package executorch in {root} has no {_IN_WHEEL / _CONFIG}")
    return found


def executorch_version(root: Path) -> str:
    """Return the version of an executorch package or prefix; empty if its files name none."""
    beside = sorted(root.parent.glob("executorch-*.dist-info"))
    if len(beside) == 1:
        return beside[0].name.removesuffix(".dist-info").partition("-")[2]
    places = [(root / "version.py", _VERSION)]
    places += [(root / folder / "executorch-config-version.cmake", _CMAKE_VERSION) for folder in IN_PREFIX]
    for file, pattern in places:
        with contextlib.suppress(OSError):
            if found := pattern.search(file.read_text(errors="replace")):
                return found[1]
    return ""


def prefix_package(prefix: Path) -> Path | None:
    """Return the folder of the CMake package in an install prefix or build folder; None when it has none."""
    return next((prefix / folder for folder in IN_PREFIX if (prefix / folder / _CONFIG).is_file()), None)


def wheel_headers(root: Path | None) -> Path:
    """Return the headers of the executorch package in `root`, else of farm's environment. Raises MissingToolError."""
    if root is not None and (root / "include" / "executorch").is_dir():
        return root / "include"
    return package_folder("executorch", "include/executorch", "build") / "include"


def _wheel(root: Path) -> NativeExecutorch | None:
    if (root / _RUNTIME).is_file() and (root / _IN_WHEEL / _CONFIG).is_file():
        return NativeExecutorch(root, root / _IN_WHEEL, executorch_version(root), shared=True)
    return None


def _prefix(root: Path, key: str, package_root: Path | None) -> NativeExecutorch:
    if found := _wheel(root):
        return found
    package = prefix_package(root)
    if package is None:
        looked = " and ".join(str(root / folder) for folder in IN_PREFIX)
        raise UsageError(f"{key}: there is no {_CONFIG} in {looked}: name a folder that ExecuTorch was installed into")
    return NativeExecutorch(root, package, executorch_version(root), shared=False, headers=wheel_headers(package_root))


def _files(root: Path) -> Iterator[Path]:
    for folder, kinds in (("include", _HEADERS), ("lib", _LINKED), ("share", _LINKED)):
        for path in (root / folder).rglob("*"):
            if path.suffix in kinds and path.is_file():
                yield path
