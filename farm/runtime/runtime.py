"""Backend + SoC -> Runtime: every file that a device needs besides the bundle, checked before it is pushed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.errors import ConfigError, IllegalTargetError, MissingToolError
from farm.runtime.file_lists import Places, device_parts, lpai_skel
from farm.runtime.native.build import build_native
from farm.runtime.native.cross_compilers import aarch64_executorch
from farm.runtime.native.elf import X86_64
from farm.runtime.native.hashes import hash_files
from farm.runtime.native.targets import LINUX_AARCH64, RUNNER, Kind, Mode
from farm.runtime.packages import package_folder, package_version
from farm.runtime.parts import Part, find_fault
from farm.runtime.qnn_sdk import (
    FIRST_WITH_LPAI,
    FIRST_WITHOUT_GPU_HOST,
    GET_SDK,
    QnnFiles,
    release_of,
    sdk_version,
)
from farm.runtime.simulator import LIBRARY, TARGET, host_sdk
from farm.suites.socs import BACKEND_PRECISIONS, Soc, check_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.runtime.simulator import HostSdk

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
# The wheel brings the C++ runtime that its libraries were linked with, an SDK may leave it to the system.
_CXX_RUNTIME = ("libc++*.so*", "libunwind*.so*")
# Beside the backend itself; libHtpPrepare.so and the others are for compiling.
_SIMULATOR_LIBRARIES = ("libQnnSystem.so", *_CXX_RUNTIME)
_LPAI_LIBRARIES = ("libQnnLpai*.so", *_SIMULATOR_LIBRARIES)


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
    cache_dir: Path,
    soc: Soc | None = None,
    backend: str = "htp",
    *,
    sdk_root: Path | None = None,
    log: Callable[[str], None] | None = None,
    runner: Path | None = None,
    sdk: HostSdk | None = None,
) -> Runtime:
    """Return what a virtual device needs to run bundles of `backend`; `sdk_root` as for `host_sdk`.

    HTP bundles run on the simulator, XNNPACK ones without anything of QNN. LPAI, which needs `soc`, takes an SDK's
    library for this machine, and the signed skel as a device would, which nothing loads here. The first call builds
    the runner; `log` gets the lines of that. `runner` and `sdk` are older ones to take instead. Raises
    IllegalTargetError, MissingToolError, InfraError, and ConfigError for a skel that is not signed as it must be.
    """
    if backend == "gpu":
        raise MissingToolError("there is no GPU simulator: attach a device")
    runner = runner or build_native(cache_dir, log=log).runner
    executorch = package_folder("executorch", "lib/libexecutorch.so", "build") / "lib"
    files = {RUNNER: runner}
    files |= {path.name: path for path in map(executorch.joinpath, EXECUTORCH_LIBRARIES) if path.is_file()}
    versions = {"executorch": package_version("executorch")}
    if backend == "xnnpack":
        return _runtime(cache_dir, files, RUNNER, versions, "simulator")
    if backend == "lpai":
        if soc is None:
            raise IllegalTargetError("the runtime of an LPAI is that of an SoC: say which")
        parts = lpai_host_parts(soc, sdk_root)
        files |= _complete(soc, backend, parts)
        versions["qnn"] = sdk_version(sdk_root)
        return _runtime(cache_dir, files, RUNNER, versions, "simulator", needs_root=True)
    sdk = sdk or host_sdk(cache_dir, sdk_root=sdk_root, log=log)
    files[LIBRARY] = sdk.lib_dir / LIBRARY
    for pattern in _SIMULATOR_LIBRARIES:
        files |= {path.name: path for path in sorted(sdk.lib_dir.glob(pattern))}
    if sdk.bridged:
        files[f"real/{LIBRARY}"] = sdk.lib_dir / "real" / LIBRARY
    return _runtime(cache_dir, files, RUNNER, {**versions, "qnn": sdk.qnn_version}, "simulator")


def lpai_host_parts(soc: Soc, sdk_root: Path | None) -> tuple[Part, ...]:
    """Return what a virtual device needs of an SDK for the LPAI of `soc`. Raises IllegalTargetError."""
    check_target(soc, "lpai", BACKEND_PRECISIONS["lpai"][0])
    get = f"{GET_SDK}, 2.39 or newer, with {TARGET} libraries"
    folder = sdk_root / "lib" / TARGET if sdk_root else None
    names = dict.fromkeys(("libQnnLpai.so", "libQnnSystem.so"))
    if folder is not None:
        names |= dict.fromkeys(path.name for pattern in _LPAI_LIBRARIES for path in sorted(folder.glob(pattern)))
    libraries = [Part(name, folder / name if folder else None, X86_64, get) for name in names]
    return (*libraries, lpai_skel(soc, QnnFiles(get, sdk_root)))


def device_runtime(
    soc: Soc, backend: str, places: Places, kind: Kind, cache_dir: Path, mode: Mode = "traditional"
) -> Runtime:
    """Return what a device with `soc` needs to run bundles of `backend`, from `places`.

    Raises IllegalTargetError, MissingToolError that names every file that is not there and how to get it, ConfigError
    for one that is made for something else or is not signed as it must be.
    """
    check_target(soc, backend, BACKEND_PRECISIONS.get(backend, ("",))[0])
    version = places.qnn.version
    release = release_of(version)
    if backend == "lpai" and release is not None and release < FIRST_WITH_LPAI:
        raise MissingToolError(f"the lpai backend of {soc.name} needs QNN 2.39 or newer, not {version}: {GET_SDK}")
    parts = device_parts(soc, backend, places, mode)
    files = _complete(soc, backend, parts)
    versions = {} if backend == "xnnpack" else {"qnn": version}
    return _runtime(cache_dir, files, parts[0].name, versions, kind, needs_root=backend == "lpai")


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
    if backend == "gpu":
        _require_host(
            soc,
            sdk_root,
            "libQnnGpu.so",
            "the one that pip installs, as all from 2.47 on, refuses to start on x86_64 without a tuning server, and "
            f"there is no GPU simulator: {GET_SDK} older than 2.47, and attach a device",
            wrong=lambda release: (
                "newer than 2.46, the last that starts on x86_64 without a tuning server, which compiling for gpu needs"
                if release >= FIRST_WITHOUT_GPU_HOST
                else ""
            ),
        )
    if backend == "lpai":
        _require_host(
            soc,
            sdk_root,
            "libQnnLpai.so",
            f"pip has none: {GET_SDK}, 2.39 or newer, with {TARGET} libraries",
            wrong=lambda release: "older than 2.39, which lpai needs" if release < FIRST_WITH_LPAI else "",
        )


def _require_host(
    soc: Soc, sdk_root: Path | None, name: str, why: str, wrong: Callable[[tuple[int, int]], str]
) -> None:
    """Raise MissingToolError unless the SDK has a library for this machine, of a release that `wrong` says nothing of.

    `why` ends in the way to get another.
    """
    needs = f"the {name.removeprefix('libQnn').removesuffix('.so').lower()} backend of {soc.name} needs"
    looked = ""
    if sdk_root is not None:
        get = why.rpartition(": ")[2]
        library = sdk_root / "lib" / TARGET / name
        release = release_of(sdk_version(sdk_root))
        if not sdk_root.is_dir():
            raise MissingToolError(f"{needs} a QNN SDK, and the QNN SDK folder {sdk_root} does not exist: {get}")
        if release is not None and (problem := wrong(release)):
            said = f"QNN {release[0]}.{release[1]} is {problem}"
            raise MissingToolError(f"{needs} another QNN SDK, as {said}: {get}")
        if library.is_file():
            return
        looked = f" (looked for {library})"
    raise MissingToolError(f"{needs} a QNN SDK with {name}{looked}, as {why}")


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


def _complete(soc: Soc, backend: str, parts: Sequence[Part]) -> dict[str, Path]:
    """Return the files by name. Raises MissingToolError that names all that are not there, ConfigError."""
    missing = [fault for part in parts if part.path is None or not part.path.is_file() if (fault := find_fault(part))]
    if missing:
        names = ", ".join(fault.problem.replace(" is missing", "") for fault in missing)
        how = "; ".join(dict.fromkeys(fault.repair for fault in missing))
        raise MissingToolError(f"{soc.name} {backend} needs {_count(len(missing))}: {names}: {how}")
    for part in parts:
        fault = find_fault(part)
        if fault is not None and part.path is not None:
            raise ConfigError(part.path, "", f"{fault.problem}: {fault.repair}")
    return {part.name: part.path for part in parts if part.path is not None}


def _count(number: int) -> str:
    return "a file that is missing" if number == 1 else f"{number} files that are missing"
