"""native_runner/ -> farm_runner and the QNN bridge for this machine, built once with the compiler that is here."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import InfraError, MissingToolError
from farm.processes import Supervisor
from farm.publish import published
from farm.resources import data_folder
from farm.runtime.packages import package_folder, package_version, packaged_tool

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNER = "farm_runner"
BRIDGE = "libQnnHtp.so"

_FLAGS = ("-DCMAKE_BUILD_TYPE=Release",)
_SOURCES = frozenset({".cpp", ".h", ".txt", ".cmake"})
_COMPILERS = ("c++", "g++", "clang++")
# What CMake takes from the environment and the binaries depend on.
_ENVIRONMENT = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
_TAIL_LINES = 12


@dataclass(frozen=True)
class NativeBuild:
    """What native_runner/ was built into; `key` is the hash of everything that went into it."""

    folder: Path
    runner: Path
    bridge: Path
    key: str


def build_native(cache_dir: Path, *, log: Callable[[str], None] | None = None) -> NativeBuild:
    """Return the runner and the bridge, built below `cache_dir` unless this very build is there.

    `log` gets the lines of the build as they come. The whole output is `build.log` in the folder. Raises
    MissingToolError (no compiler, cmake, ninja or executorch: which, and how to get it), and InfraError when the
    sources do not build, with the last lines.
    """
    sources = data_folder("native_runner")
    compiler = _compiler()
    key = _key(sources, compiler)
    folder = published(
        cache_dir / "native" / key, lambda partial: _build(sources, compiler, partial, log or (lambda _line: None))
    )
    return NativeBuild(folder, folder / RUNNER, folder / BRIDGE, key)


def _compiler() -> Path:
    wanted = os.environ.get("CXX", "")
    names = shlex.split(wanted)[:1] or _COMPILERS
    for name in names:
        if found := shutil.which(name):
            return Path(found)
    where = f"CXX is {wanted!r} and there is no such program" if wanted else f"none of {', '.join(names)} is in PATH"
    raise MissingToolError(f"a C++ compiler is needed to build the runner and {where}: apt-get install g++")


def _key(sources: Path, compiler: Path) -> str:
    digest = hashlib.sha256()
    for name, content in _source_files(sources):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    # The compiler is not started to ask for its version: this is done at every start of farm.
    program = compiler.resolve()
    stat = program.stat()
    digest.update(f"{program}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    for part in (package_version("executorch"), *_FLAGS, *(os.environ.get(name, "") for name in _ENVIRONMENT)):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:32]


def _source_files(sources: Path) -> list[tuple[str, bytes]]:
    paths = sorted(path for path in sources.rglob("*") if path.suffix in _SOURCES and path.is_file())
    if not paths:
        raise InfraError(f"{sources}: has no sources of the native runner: this installation of farm is damaged")
    return [(path.relative_to(sources).as_posix(), path.read_bytes()) for path in paths]


def _build(sources: Path, compiler: Path, folder: Path, log: Callable[[str], None]) -> None:
    executorch = package_folder("executorch", "share/cmake/executorch-config.cmake", "build")
    cmake, ninja = packaged_tool("cmake", "simulator"), packaged_tool("ninja", "simulator")
    # Not in the folder that is published, which keeps the two binaries and the log only.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        run = functools.partial(_run, log=log, record=folder / "build.log", scratch=Path(scratch))
        run(
            [
                cmake,
                *("-G", "Ninja", "-S", sources, "-B", Path(scratch) / "tree", *_FLAGS),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DCMAKE_PREFIX_PATH={executorch / 'share' / 'cmake'}",
                *([] if os.environ.get("CXX") else [f"-DCMAKE_CXX_COMPILER={compiler}"]),
            ]
        )
        run([ninja, "-C", Path(scratch) / "tree"])
        for name in (RUNNER, BRIDGE):
            shutil.copy2(Path(scratch) / "tree" / name, folder / name)


def _run(argv: list[str | Path], *, log: Callable[[str], None], record: Path, scratch: Path) -> None:
    name = Path(argv[0]).name
    errors = scratch / f"{name}.stderr"
    lines: list[str] = []
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name=name, stdout_pipe=True, stderr=errors)
        for raw in child.process.stdout or ():
            lines.append(raw.decode(errors="replace").rstrip("\n"))
            log(lines[-1])
        code = child.process.wait()
    lines += errors.read_text(errors="replace").splitlines()
    with record.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    if code != 0:
        tail = "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])
        raise InfraError(f"the native runner does not build: {name} ended with exit code {code}:\n{tail}")
