"""Compiler, ExecuTorch package and CMake arguments of a target; errors name missing parts and the way to get them."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from farm.base.errors import MissingToolError
from farm.builds.runtime.native.executorch import (
    IN_PREFIX,
    NativeExecutorch,
    content_of,
    default_executorch,
    prefix_package,
    wheel_headers,
)
from farm.builds.runtime.native.targets import BRIDGE, HOST, RUNNER, BuildTarget
from farm.builds.runtime.native.wheels import fetch_wheel, wheel_folder
from farm.builds.runtime.packages import package_version

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


@dataclass(frozen=True)
class CMakeToolchain:
    """Settings of CMake for a target."""

    target: BuildTarget
    arguments: tuple[str, ...]
    identity: tuple[str, ...]
    """Ingredients of the binaries besides the sources."""
    products: tuple[str, ...]
    package: Path | None = None
    """Folder of ExecuTorch's CMake package; None if it is in a wheel that is fetched first."""

    def executorch(self, cache_dir: Path) -> Path:
        """Return the folder of ExecuTorch's CMake package, and fetch its wheel if needed."""
        if self.package is not None:
            return self.package
        return aarch64_executorch(cache_dir) / "share" / "cmake"

    def environment(self) -> dict[str, str]:
        """Return the environment that cmake and ninja start with."""
        foreign = () if self.target.name == HOST else _ENVIRONMENT
        return {name: value for name, value in os.environ.items() if name not in foreign}


def find_toolchain(
    target: BuildTarget,
    sources: Path,
    cache_dir: Path,
    android: AndroidKit | None,
    executorch: NativeExecutorch | None,
) -> CMakeToolchain:
    """Return the settings for a build of `sources` (native_runner/) for `target`. Starts and fetches nothing.

    `executorch` is for the target of this machine, None for the ExecuTorch of farm's environment; `cache_dir` keeps the
    hashes of files. Raises MissingToolError.
    """
    if target.kind == "android":
        return _android(target, cache_dir, android or AndroidKit())
    if target.kind == "linux":
        return _aarch64(target, sources)
    if target.kind == "oe-linux":
        raise MissingToolError(
            f"farm has no runner of its own for {target.name}, as no package has ExecuTorch's QNN backend for it: "
            f"set FARM_EXECUTORCH_LINUX_BUILD to the folder of an ExecuTorch build for Arm Linux, or "
            "executorch_linux_build in the [qnn] table of farm.toml"
        )
    return _host(target, cache_dir, executorch)


def aarch64_executorch(cache_dir: Path) -> Path:
    """Return the executorch package for aarch64 Linux, fetched on the first call. Raises MissingToolError."""
    keep = tuple(f"executorch/{folder}/" for folder in ("include", "lib", "share"))
    return fetch_wheel(cache_dir, "executorch", "aarch64", "build", keep) / "executorch"


def planned_aarch64_executorch(cache_dir: Path) -> Path:
    """Return the folder of `aarch64_executorch`, without fetching. Raises MissingToolError."""
    return wheel_folder(cache_dir, "executorch", "aarch64", "build") / "executorch"


def _host(target: BuildTarget, cache_dir: Path, executorch: NativeExecutorch | None) -> CMakeToolchain:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise MissingToolError(
            f"{target.name} is built on x86_64 Linux, this is {platform.system()} {platform.machine()}: "
            "use such a machine for building and for virtual devices"
        )
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
    return CMakeToolchain(
        target,
        arguments=tuple(arguments),
        identity=(
            *_file_identity(compiler),
            executorch.identity(cache_dir),
            *(os.environ.get(name, "") for name in _ENVIRONMENT),
        ),
        products=(RUNNER, BRIDGE),
        package=executorch.package,
    )


def _aarch64(target: BuildTarget, sources: Path) -> CMakeToolchain:
    compiler = shutil.which(_AARCH64_COMPILER)
    if compiler is None:
        raise MissingToolError(
            f"{_AARCH64_COMPILER} is needed to build the runner for {target.name} and is not in PATH: "
            "apt-get install g++-aarch64-linux-gnu"
        )
    return CMakeToolchain(
        target,
        arguments=(f"-DCMAKE_TOOLCHAIN_FILE={sources / 'cmake' / 'linux-aarch64.cmake'}",),
        identity=(target.name, *_file_identity(Path(compiler)), package_version("executorch")),
        products=(RUNNER,),
    )


def _android(target: BuildTarget, cache_dir: Path, kit: AndroidKit) -> CMakeToolchain:
    ndk = _ndk_root(target, kit.ndk_root)
    package = _prefix_package(target, kit.executorch)
    # The prefix lacks headers of the profiler, which the wheel of the same version has.
    headers = wheel_headers(kit.package)
    return CMakeToolchain(
        target,
        arguments=(
            f"-DCMAKE_TOOLCHAIN_FILE={ndk / _NDK_TOOLCHAIN}",
            f"-DANDROID_ABI={_ANDROID_ABI}",
            f"-DANDROID_PLATFORM={_ANDROID_PLATFORM}",
            f"-DFARM_EXECUTORCH_HEADERS={headers}",
        ),
        identity=(
            target.name,
            *_file_identity(ndk / "source.properties"),
            *_file_identity(ndk / _NDK_TOOLCHAIN),
            content_of(cache_dir, _prefix_root(package)),
            content_of(cache_dir, headers.parent),
        ),
        products=(RUNNER,),
        package=package,
    )


def _ndk_root(target: BuildTarget, root: Path | None) -> Path:
    if root is not None and (root / _NDK_TOOLCHAIN).is_file():
        return root
    problem = f"{root / _NDK_TOOLCHAIN} is not there" if root is not None else "ANDROID_NDK_ROOT is not set"
    raise MissingToolError(
        f"{target.name} needs an Android NDK and {problem}: set ANDROID_NDK_ROOT to the folder of an Android NDK (one "
        f"with {_NDK_TOOLCHAIN}), or android_ndk_root in the [qnn] table of farm.toml"
    )


def _prefix_package(target: BuildTarget, prefix: Path | None) -> Path:
    if prefix is not None and (package := prefix_package(prefix)) is not None:
        return package
    problem = "FARM_ANDROID_EXECUTORCH is not set"
    if prefix is not None:
        problem = f"there is no executorch-config.cmake in {' and '.join(str(prefix / place) for place in IN_PREFIX)}"
    raise MissingToolError(
        f"{target.name} needs ExecuTorch for Android and {problem}: build ExecuTorch for Android and install it "
        "(docs/guides/runtime.md has the commands), then set FARM_ANDROID_EXECUTORCH to its prefix, or "
        "android_executorch in the [qnn] table of farm.toml"
    )


def _prefix_root(package: Path) -> Path:
    # share/cmake or lib/cmake/ExecuTorch -> the prefix
    return package.parents[1] if package.name == "cmake" else package.parents[2]


def _file_identity(path: Path) -> tuple[str, ...]:
    # A compiler is not started to ask for its version: this is done at every start of farm.
    real = path.resolve()
    if not real.is_file():
        return (str(real), "", "")
    stat = real.stat()
    return (str(real), str(stat.st_size), str(stat.st_mtime_ns))
