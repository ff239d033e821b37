"""Native programs of farm: their targets, sources of ExecuTorch, cross compilers, and builds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from farm.base.backends.descriptor import Backend
from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import Config
from farm.base.errors import InfraError, MissingToolError, UnknownNameError, UsageError
from farm.base.files import published, require_own
from farm.base.hashes import digest_of, hash_files
from farm.base.paths import data_folder
from farm.base.processes import Supervisor
from farm.base.text import one_line
from farm.builds.runtime.packages import fetch_wheel, package_folder, package_version, packaged_tool, wheel_folder
from farm.builds.runtime.parts import AARCH64, X86_64

# Targets of native_runner/, and the backends with a runtime on each.


Kind = Literal["simulator", "linux", "android", "oe-linux"]
Mode = Literal["traditional", "direct"]
"""Place of QNN and ExecuTorch's delegate: on the device's processor, which calls the DSP, or on the DSP itself."""


class BuildTarget(msgspec.Struct, frozen=True):
    """Operating system and processor."""

    name: str
    kind: Kind
    machine: int
    """e_machine of its ELF files."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends with a runtime on the target: first those without need of root, CPU backends last."""
        return tuple(
            one.name
            for one in sorted(BACKENDS.values(), key=lambda one: (one.on_cpu, one.needs_root))
            if self._runs(one)
        )

    @property
    def rehearses(self) -> tuple[str, ...]:
        """Backends whose staging, options and rights can be tried on the target before a device is available."""
        if self.kind != "simulator":
            return ()
        return tuple(one.name for one in BACKENDS.values() if one.on_host == "rehearsed")

    def _runs(self, backend: Backend) -> bool:
        if self.kind == "simulator":
            return backend.on_host == "runs"
        # The aarch64 executorch wheel has no QNN backend, and the runner for Arm Linux with QNN is ExecuTorch's.
        return self.kind == "android" or backend.on_cpu == (self.kind == "linux")


HOST = "linux-x86_64"
LINUX_AARCH64 = "linux-aarch64"
ANDROID = "android-arm64"
OE_LINUX = "oe-linux-aarch64"


def way_to_set(variable: str, folder: str) -> str:
    """Return the way to name a folder for farm: its variable, or the key of farm.toml with the same name."""
    return f"set {variable} to {folder}, or {variable.removeprefix('FARM_').lower()} in the [qnn] table of farm.toml"


GET_LINUX_BUILD = way_to_set("FARM_EXECUTORCH_LINUX_BUILD", "the folder of an ExecuTorch build for Arm Linux")
RUNNER = "farm_runner"
"""Program that native_runner/ builds for every target."""
BRIDGE = "libQnnHtp.so"
"""Library that native_runner/ builds for this machine only."""

TARGETS = {
    target.name: target
    for target in (
        BuildTarget(HOST, "simulator", X86_64),
        BuildTarget(LINUX_AARCH64, "linux", AARCH64),
        BuildTarget(ANDROID, "android", AARCH64),
        BuildTarget(OE_LINUX, "oe-linux", AARCH64),
    )
}


def find_target(name: str) -> BuildTarget:
    """Return a target by name. Raises UnknownNameError."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UnknownNameError("target", name, TARGETS) from None


# ExecuTorch's C++ for this machine, shipped by the toolchain or, without one, by farm's environment.


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


# Compiler, ExecuTorch package and CMake arguments of a target; errors name missing parts and the way to get them.


_COMPILERS = ("c++", "g++", "clang++")
_AARCH64_COMPILER = "aarch64-linux-gnu-g++"
# Variables that CMake reads and binaries depend on. Their values are for this machine, not for cross compilers.
_ENVIRONMENT = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
_NDK_TOOLCHAIN = Path("build/cmake/android.toolchain.cmake")
_ANDROID_ABI = "arm64-v8a"
# ExecuTorch 1.5, backends/qualcomm/scripts/build.sh: the platform of the linked libraries.
_ANDROID_PLATFORM = "android-30"


@dataclass(frozen=True)
class AndroidKit:
    """Folders of the parts of an Android build; None for a part that is not configured."""

    ndk_root: Path | None = None
    executorch: Path | None = None
    """ExecuTorch install prefix, made by `cmake --install` of an ExecuTorch build for Android."""
    package: Path | None = None
    """The `executorch` package of the toolchain, for headers that the prefix lacks; None for farm's own."""


class _Settings(NamedTuple):
    """Settings of CMake for a target."""

    arguments: tuple[str, ...]
    identity: tuple[str, ...]
    """Ingredients of the binaries besides the sources."""
    package: Path | None = None
    """Folder of ExecuTorch's CMake package; None if it is in a wheel that is fetched first."""


def require_build_machine(what: str) -> None:
    """Raise MissingToolError, which begins with `what`, on a machine other than x86_64 Linux."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise MissingToolError(
            f"{what} on x86_64 Linux, this is {platform.system()} {platform.machine()}: "
            "use such a machine for building and for virtual devices"
        )


def aarch64_executorch(cache_dir: Path) -> Path:
    """Return the executorch package for aarch64 Linux, fetched on the first call. Raises MissingToolError."""
    return fetch_wheel(cache_dir, "executorch") / "executorch"


def planned_aarch64_executorch(cache_dir: Path) -> Path:
    """Return the folder of `aarch64_executorch`, without fetching. Raises MissingToolError."""
    return wheel_folder(cache_dir, "executorch") / "executorch"


def _host(cache_dir: Path, executorch: NativeExecutorch | None) -> _Settings:
    require_build_machine(f"{HOST} is built")
    wanted = os.environ.get("CXX", "")
    names = shlex.split(wanted)[:1] or _COMPILERS
    compiler = next((Path(found) for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        where = f"CXX is {wanted!r} and there is no such program"
        where = where if wanted else f"none of {', '.join(names)} is in PATH"
        raise MissingToolError(f"a C++ compiler is needed to build the runner and {where}: apt-get install g++")
    executorch = executorch or default_executorch()
    arguments = [] if wanted else [f"-DCMAKE_CXX_COMPILER={compiler}"]
    arguments += [f"-DFARM_EXECUTORCH_HEADERS={executorch.headers}"] if executorch.headers else []
    flags = (os.environ.get(name, "") for name in _ENVIRONMENT)
    identity = (*_file_identity(compiler), executorch.identity(cache_dir), *flags)
    return _Settings(tuple(arguments), identity, executorch.package)


def _aarch64(sources: Path) -> _Settings:
    compiler = shutil.which(_AARCH64_COMPILER)
    if compiler is None:
        raise MissingToolError(
            f"{_AARCH64_COMPILER} is needed to build the runner for {LINUX_AARCH64} and is not in PATH: "
            "apt-get install g++-aarch64-linux-gnu"
        )
    identity = (LINUX_AARCH64, *_file_identity(Path(compiler)), package_version("executorch"))
    return _Settings((f"-DCMAKE_TOOLCHAIN_FILE={sources / 'cmake' / 'linux-aarch64.cmake'}",), identity)


def _android(cache_dir: Path, kit: AndroidKit) -> _Settings:
    ndk, prefix = kit.ndk_root, kit.executorch
    if ndk is None or not (ndk / _NDK_TOOLCHAIN).is_file():
        problem = f"{ndk / _NDK_TOOLCHAIN} is not there" if ndk is not None else "ANDROID_NDK_ROOT is not set"
        raise MissingToolError(
            f"{ANDROID} needs an Android NDK and {problem}: "
            + way_to_set("ANDROID_NDK_ROOT", f"the folder of an Android NDK (one with {_NDK_TOOLCHAIN})")
        )
    package = prefix_package(prefix) if prefix is not None else None
    if prefix is None or package is None:
        problem = "FARM_ANDROID_EXECUTORCH is not set"
        if prefix is not None:
            problem = f"there is no {_CONFIG} in {' and '.join(str(prefix / place) for place in IN_PREFIX)}"
        raise MissingToolError(
            f"{ANDROID} needs ExecuTorch for Android and {problem}: build ExecuTorch for Android and install it "
            f"(docs/guides/runtime.md has the commands), then {way_to_set('FARM_ANDROID_EXECUTORCH', 'its prefix')}"
        )
    # The prefix lacks headers of the profiler, which the wheel of the same version has.
    headers = wheel_headers(kit.package)
    return _Settings(
        (
            f"-DCMAKE_TOOLCHAIN_FILE={ndk / _NDK_TOOLCHAIN}",
            f"-DANDROID_ABI={_ANDROID_ABI}",
            f"-DANDROID_PLATFORM={_ANDROID_PLATFORM}",
            f"-DFARM_EXECUTORCH_HEADERS={headers}",
        ),
        (
            ANDROID,
            *_file_identity(ndk / "source.properties"),
            *_file_identity(ndk / _NDK_TOOLCHAIN),
            content_of(cache_dir, prefix),
            content_of(cache_dir, headers.parent),
        ),
        package,
    )


def _file_identity(path: Path) -> tuple[str, ...]:
    # A compiler is not started to ask for its version: this is done at every start of farm.
    real = path.resolve()
    if not real.is_file():
        return (str(real), "", "")
    stat = real.stat()
    return (str(real), str(stat.st_size), str(stat.st_mtime_ns))


# native_runner/ -> farm_runner for a target, and the QNN bridge for this machine, built once.


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
        """Path of this machine's bridge."""
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
    settings, build = _plan(cache_dir, target, android, executorch)
    published(build.folder, lambda partial: _build(target, settings, cache_dir, partial))
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
    _, build = _plan(cache_dir, target, android, executorch)
    require_own(build.folder)
    return build


def _plan(
    cache_dir: Path, name: str, android: AndroidKit | None, executorch: NativeExecutorch | None
) -> tuple[_Settings, NativeBuild]:
    """Return the settings for the target called `name`, and its build, there or not. Starts and fetches nothing."""
    sources, target = data_folder("native_runner"), find_target(name)
    if target.kind == "oe-linux":
        raise MissingToolError(
            f"farm has no runner of its own for {target.name}, as no package has ExecuTorch's QNN backend for it: "
            f"{GET_LINUX_BUILD}"
        )
    if target.kind == "android":
        settings = _android(cache_dir, android or AndroidKit())
    elif target.kind == "linux":
        settings = _aarch64(sources)
    else:
        settings = _host(cache_dir, executorch)
    return settings, native_of(cache_dir, _key(sources, settings.identity))


def _key(sources: Path, identity: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    paths = sorted(path for path in sources.rglob("*") if path.suffix in _SOURCES and path.is_file())
    if not paths:
        raise InfraError(f"{sources}: has no sources of the native runner: this installation of farm is damaged")
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()}\0{len(content)}\0".encode() + content)
    for part in (*identity, *_FLAGS):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:32]


def _build(target: str, settings: _Settings, cache_dir: Path, folder: Path) -> None:
    logger.info("building the native runner for %s, once for this compiler and ExecuTorch (half a minute)", target)
    package = settings.package or aarch64_executorch(cache_dir) / "share" / "cmake"
    cmake, ninja = packaged_tool("cmake", "simulator"), packaged_tool("ninja", "simulator")
    env = {name: value for name, value in os.environ.items() if target == HOST or name not in _ENVIRONMENT}
    # The build tree is temporary: the published folder keeps only the binaries and the log.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        tree = Path(scratch) / "tree"
        run = functools.partial(_run, record=folder / "build.log", scratch=Path(scratch), env=env)
        run(
            [
                cmake,
                *("-G", "Ninja", "-S", data_folder("native_runner"), "-B", tree, *_FLAGS),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-Dexecutorch_DIR={package}",
                *settings.arguments,
            ]
        )
        run([ninja, "-C", tree])
        # There is no bridge for devices, which get the libraries of one SDK.
        for product in (RUNNER, BRIDGE) if target == HOST else (RUNNER,):
            shutil.copy2(tree / product, folder / product)


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
