"""Backend + SoC -> Runtime: every file that a device needs besides the bundle, checked before it is pushed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.errors import ConfigError, MissingToolError
from farm.profiles import BACKEND_PRECISIONS, Soc, check_target
from farm.runtime.hashes import hash_files
from farm.runtime.native import build_native
from farm.runtime.packages import package_folder, package_version
from farm.runtime.parts import GET_SDK, Part, android_parts, find_fault
from farm.runtime.simulator import LIBRARY, TARGET, host_sdk
from farm.runtime.targets import LINUX_AARCH64, RUNNER, Kind
from farm.runtime.toolchains import aarch64_executorch

if TYPE_CHECKING:
    from collections.abc import Callable

# What CMake links into the runner: native_runner/src/CMakeLists.txt.
EXECUTORCH_LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_threadpool.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_etdump.so",
    "libexecutorch_backend_qnn.so",
    "libexecutorch_backend_xnnpack.so",
)
# Beside libQnnHtp.so itself; libHtpPrepare.so and the others are for compiling. The wheel brings the C++ runtime
# that its libraries were linked with, an SDK may leave it to the system.
_SIMULATOR_LIBRARIES = ("libQnnSystem.so", "libc++*.so*", "libunwind*.so*")


class Runtime(msgspec.Struct, frozen=True):
    """Runner and libraries. On a device they lie in one folder, from which the runner finds everything."""

    files: dict[str, Path]
    """Local file by path on the device, relative to the runtime folder; a symbolic link stands for its target."""
    digest: str
    """Hash over the names and contents of `files`."""
    runner: str
    """Which of `files` to execute."""
    versions: dict[str, str]
    """What numbers depend on: `runner` and `skel` are hashes, `qnn` and `executorch` versions, where known."""
    kind: Kind
    needs_root: bool = False
    """The runner must run as root (LPAI: signed process domain)."""
    hashes: dict[str, str] = {}
    """SHA-256 of each of `files`, by the same names."""


def simulator_runtime(
    cache_dir: Path, *, sdk_root: Path | None = None, log: Callable[[str], None] | None = None
) -> Runtime:
    """Return what a virtual device needs to run HTP bundles on the simulator; `sdk_root` as for `host_sdk`.

    The first call builds the runner; `log` gets the lines of that. Raises MissingToolError, InfraError.
    """
    native = build_native(cache_dir, log=log)
    sdk = host_sdk(cache_dir, sdk_root=sdk_root, log=log)
    executorch = package_folder("executorch", "lib/libexecutorch.so", "build") / "lib"
    files = {RUNNER: native.runner, LIBRARY: sdk.lib_dir / LIBRARY}
    files |= {path.name: path for path in map(executorch.joinpath, EXECUTORCH_LIBRARIES) if path.is_file()}
    for pattern in _SIMULATOR_LIBRARIES:
        files |= {path.name: path for path in sorted(sdk.lib_dir.glob(pattern))}
    if sdk.bridged:
        files[f"real/{LIBRARY}"] = sdk.lib_dir / "real" / LIBRARY
    versions = {"executorch": package_version("executorch"), "qnn": sdk.qnn_version}
    return _runtime(cache_dir, files, RUNNER, versions, "simulator")


def android_runtime(
    soc: Soc, backend: str, sdk_root: Path, runner: Path, backend_library: Path, cache_dir: Path
) -> Runtime:
    """Return what an Android device with `soc` needs to run bundles of `backend`.

    `sdk_root` is a QNN SDK; `runner` and `backend_library` (libqnn_executorch_backend.so) come from an ExecuTorch
    build for aarch64-android. Raises IllegalTargetError, MissingToolError that names every file that is not there,
    ConfigError for one that is made for something else or is not signed where it must be.
    """
    check_target(soc, backend, BACKEND_PRECISIONS.get(backend, ("",))[0])
    parts = android_parts(soc, backend, sdk_root, runner, backend_library)
    files = {part.name: part.path for part in parts if part.path is not None}
    missing = [f"{name} (looked for {path})" for name, path in files.items() if not path.is_file()]
    if missing:
        how = "; ".join(dict.fromkeys(part.get for part in parts if part.path and not part.path.is_file()))
        raise MissingToolError(f"{soc.name} {backend} needs {_count(len(missing))}: {', '.join(missing)}: {how}")
    _verify(parts)
    versions = {} if backend == "xnnpack" else {"qnn": _sdk_version(sdk_root)}
    return _runtime(cache_dir, files, runner.name, versions, "android", needs_root=backend == "lpai")


def linux_runtime(cache_dir: Path, *, log: Callable[[str], None] | None = None) -> Runtime:
    """Return what an aarch64 Linux device needs to run bundles of the processor alone (XNNPACK, portable kernels).

    The first call fetches the aarch64 executorch wheel and builds the runner; `log` gets the lines of that. Raises
    MissingToolError, InfraError.
    """
    native = build_native(cache_dir, LINUX_AARCH64, log=log)
    libraries = aarch64_executorch(cache_dir, log=log) / "lib"
    files = {RUNNER: native.runner}
    files |= {path.name: path for path in map(libraries.joinpath, EXECUTORCH_LIBRARIES) if path.is_file()}
    return _runtime(cache_dir, files, RUNNER, {"executorch": package_version("executorch")}, "linux")


def require_backend(soc: Soc, backend: str, sdk_root: Path | None) -> None:
    """Raise MissingToolError, in one line that says what to set, unless `backend` can be compiled for `soc` here.

    HTP and XNNPACK compile with what pip installs. GPU and LPAI need a QNN SDK, `sdk_root`. Raises IllegalTargetError
    for a backend that `soc` does not have.
    """
    check_target(soc, backend, BACKEND_PRECISIONS.get(backend, ("",))[0])
    if backend == "gpu" and not _has_host_library(sdk_root, "libQnnGpu.so"):
        raise MissingToolError(
            f"the gpu backend of {soc.name} needs a QNN SDK{_looked(sdk_root, 'libQnnGpu.so')}: the libQnnGpu.so that "
            f"pip installs (2.47 to 2.51) refuses to start on x86_64 without a tuning server; {GET_SDK} older than "
            "2.47, and attach a device: there is no GPU simulator"
        )
    if backend == "lpai" and not _has_host_library(sdk_root, "libQnnLpai.so"):
        raise MissingToolError(
            f"the lpai backend of {soc.name} needs a QNN SDK{_looked(sdk_root, 'libQnnLpai.so')}: pip has no "
            f"libQnnLpai.so; {GET_SDK}, 2.39 or newer, and attach a rooted device: there is no LPAI simulator"
        )


def _has_host_library(sdk_root: Path | None, name: str) -> bool:
    return sdk_root is not None and (sdk_root / "lib" / TARGET / name).is_file()


def _looked(sdk_root: Path | None, name: str) -> str:
    return "" if sdk_root is None else f" with {name} (looked for {sdk_root / 'lib' / TARGET / name})"


def _runtime(
    cache_dir: Path,
    files: dict[str, Path],
    runner: str,
    versions: dict[str, str],
    kind: Kind,
    needs_root: bool = False,
) -> Runtime:
    hashes = hash_files(cache_dir, files.values())
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashes[files[name]]}\0".encode())
    known = {name: version for name, version in versions.items() if version}
    known["runner"] = hashes[files[runner]]
    for name in files:
        if name.endswith("Skel.so"):
            known["skel"] = hashes[files[name]]
    return Runtime(
        files, digest.hexdigest(), runner, known, kind, needs_root, {name: hashes[path] for name, path in files.items()}
    )


def _verify(parts: tuple[Part, ...]) -> None:
    for part in parts:
        fault = find_fault(part)
        if fault is not None and part.path is not None:
            raise ConfigError(part.path, "", f"{fault.problem}: {fault.repair}")


def _sdk_version(sdk_root: Path) -> str:
    # QAIRT SDKs carry `version: 2.47.0.260601` in sdk.yaml and are unpacked into a folder named so.
    try:
        lines = (sdk_root / "sdk.yaml").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip(" '\"") for line in lines if line.startswith("version:")]
    return (named or [sdk_root.name])[0]


def _count(number: int) -> str:
    return "a file that is missing" if number == 1 else f"{number} files that are missing"
