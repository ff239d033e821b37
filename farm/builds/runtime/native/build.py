"""native_runner/ -> farm_runner for a target, and the QNN bridge for this machine, built once."""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from farm.base.errors import InfraError
from farm.base.processes import Supervisor
from farm.base.publish import published
from farm.base.resources import data_folder
from farm.base.trust import require_own
from farm.builds.runtime.native.cross_compilers import AndroidKit, CMakeToolchain, find_toolchain
from farm.builds.runtime.native.executorch import NativeExecutorch
from farm.builds.runtime.native.targets import BRIDGE, HOST, RUNNER, find_target
from farm.builds.runtime.packages import packaged_tool

logger = logging.getLogger(__name__)

_FLAGS = ("-DCMAKE_BUILD_TYPE=Release",)
_SOURCES = frozenset({".cpp", ".h", ".txt", ".cmake"})
_TAIL_LINES = 12


@dataclass(frozen=True)
class NativeBuild:
    """Build of native_runner/; the name of its folder is the key, a hash of all its ingredients."""

    folder: Path

    @property
    def key(self) -> str:
        """Hash of all ingredients."""
        return self.folder.name

    @property
    def runner(self) -> Path:
        """Path of the runner."""
        return self.folder / RUNNER

    @property
    def bridge(self) -> Path:
        """Path of this machine's bridge. Builds for devices have none, as a device gets the libraries of one SDK."""
        return self.folder / BRIDGE

    @property
    def built(self) -> bool:
        """True if the build exists."""
        return self.folder.is_dir()


def build_native(
    cache_dir: Path,
    target: str = HOST,
    *,
    android: AndroidKit | None = None,
    executorch: NativeExecutorch | None = None,
) -> NativeBuild:
    """Return the runner for `target`, built below `cache_dir` unless the same build is there.

    `executorch` is the ExecuTorch for the runner of this machine, None for the one in farm's environment. `android` has
    NDK and ExecuTorch for the Android target. The output of the build is `build.log` in the folder. Raises
    UnknownNameError, MissingToolError with the missing part (compiler, cmake, ninja, executorch or NDK) and the way to
    get it, and InfraError for sources that do not build, with the last lines of the log.
    """
    sources, toolchain, build = _plan(cache_dir, target, android, executorch)
    published(build.folder, lambda partial: _build(sources, toolchain, cache_dir, partial, target))
    return build


def native_of(cache_dir: Path, key: str) -> NativeBuild:
    """Return the build of `key`, there or not."""
    return NativeBuild(cache_dir / "native" / key)


def planned_native(
    cache_dir: Path,
    target: str = HOST,
    *,
    android: AndroidKit | None = None,
    executorch: NativeExecutorch | None = None,
) -> NativeBuild:
    """Return what `build_native` would, without building.

    Raises UnknownNameError, MissingToolError, UntrustedError where another user could have written it.
    """
    build = _plan(cache_dir, target, android, executorch)[2]
    require_own(build.folder)
    return build


def _plan(
    cache_dir: Path, target: str, android: AndroidKit | None, executorch: NativeExecutorch | None
) -> tuple[Path, CMakeToolchain, NativeBuild]:
    sources = data_folder("native_runner")
    toolchain = find_toolchain(find_target(target), sources, cache_dir, android, executorch)
    return sources, toolchain, native_of(cache_dir, _key(sources, toolchain))


def _key(sources: Path, toolchain: CMakeToolchain) -> str:
    digest = hashlib.sha256()
    for name, content in _source_files(sources):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for part in (*toolchain.identity, *_FLAGS):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:32]


def _source_files(sources: Path) -> list[tuple[str, bytes]]:
    paths = sorted(path for path in sources.rglob("*") if path.suffix in _SOURCES and path.is_file())
    if not paths:
        raise InfraError(f"{sources}: has no sources of the native runner: this installation of farm is damaged")
    return [(path.relative_to(sources).as_posix(), path.read_bytes()) for path in paths]


def _build(sources: Path, toolchain: CMakeToolchain, cache_dir: Path, folder: Path, target: str) -> None:
    logger.info("building the native runner for %s, once for this compiler and ExecuTorch (half a minute)", target)
    executorch = toolchain.executorch(cache_dir)
    cmake, ninja = packaged_tool("cmake", "simulator"), packaged_tool("ninja", "simulator")
    # The build tree is temporary: the published folder keeps only the binaries and the log.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        tree = Path(scratch) / "tree"
        run = functools.partial(_run, record=folder / "build.log", scratch=Path(scratch), env=toolchain.environment())
        run(
            [
                cmake,
                *("-G", "Ninja", "-S", sources, "-B", tree, *_FLAGS),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-Dexecutorch_DIR={executorch}",
                *toolchain.arguments,
            ]
        )
        run([ninja, "-C", tree])
        for name in toolchain.products:
            shutil.copy2(tree / name, folder / name)


def _run(argv: list[str | Path], *, record: Path, scratch: Path, env: dict[str, str]) -> None:
    name = Path(argv[0]).name
    errors = scratch / f"{name}.stderr"
    lines: list[str] = []
    with Supervisor() as supervisor:
        child = supervisor.spawn(argv, name=name, env=env, stdout_pipe=True, stderr=errors)
        for raw in child.process.stdout or ():
            lines.append(raw.decode(errors="replace").rstrip("\n"))
            logger.debug("%s", lines[-1])
        code = child.process.wait()
    lines += errors.read_text(errors="replace").splitlines()
    with record.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    if code != 0:
        tail = "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])
        raise InfraError(f"the native runner does not build: {name} ended with exit code {code}:\n{tail}")
