"""Backend + SoC -> Runtime: every file that a device needs besides the bundle, checked before it is pushed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from farm.errors import ConfigError, MissingToolError
from farm.profiles import BACKEND_PRECISIONS, Soc, check_target
from farm.runtime.elf import AARCH64, HEXAGON, MACHINES, read_elf
from farm.runtime.hashes import hash_files
from farm.runtime.native import RUNNER, build_native
from farm.runtime.packages import package_folder, package_version
from farm.runtime.simulator import LIBRARY, TARGET, host_sdk

if TYPE_CHECKING:
    from collections.abc import Callable

ANDROID_TARGET = "aarch64-android"

# What CMake links into the runner: native_runner/src/CMakeLists.txt.
_EXECUTORCH_LIBRARIES = (
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

_GET_SDK = "set QNN_SDK_ROOT to a QNN SDK from Qualcomm (Qualcomm AI Engine Direct)"


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
    kind: Literal["simulator", "android"]
    needs_root: bool = False
    """The runner must run as root (LPAI: signed process domain)."""


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
    files |= {path.name: path for path in map(executorch.joinpath, _EXECUTORCH_LIBRARIES) if path.is_file()}
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
    wanted = {path.name: path for path in (runner, backend_library)}
    libraries = sdk_root / "lib" / ANDROID_TARGET
    wanted |= {name: libraries / name for name in ("libQnnSystem.so", *_android_libraries(soc, backend))}
    skel = _skel(soc, backend, sdk_root)
    missing = [f"{path.name} (looked for {path})" for path in (*wanted.values(), *skel) if not path.is_file()]
    if missing:
        raise MissingToolError(
            f"{soc.name} {backend} needs {_count(len(missing))}: {', '.join(missing)}: {_how(soc, backend, sdk_root)}"
        )
    for path in wanted.values():
        _check_machine(path, AARCH64)
    for path in skel:
        _check_skel(path, soc, backend)
    versions = {"qnn": _sdk_version(sdk_root)}
    files = wanted | {path.name: path for path in skel}
    return _runtime(cache_dir, files, runner.name, versions, "android", needs_root=backend == "lpai")


def require_backend(soc: Soc, backend: str, sdk_root: Path | None) -> None:
    """Raise MissingToolError, in one line that says what to set, unless `backend` can be compiled for `soc` here.

    HTP compiles with what pip installs. GPU and LPAI need a QNN SDK, `sdk_root`. Raises IllegalTargetError for a
    backend that `soc` does not have.
    """
    check_target(soc, backend, BACKEND_PRECISIONS.get(backend, ("",))[0])
    if backend == "gpu" and not _has_host_library(sdk_root, "libQnnGpu.so"):
        raise MissingToolError(
            f"the gpu backend of {soc.name} needs a QNN SDK{_looked(sdk_root, 'libQnnGpu.so')}: the libQnnGpu.so that "
            f"pip installs (2.47 to 2.51) refuses to start on x86_64 without a tuning server; {_GET_SDK} older than "
            "2.47, and attach a device: there is no GPU simulator"
        )
    if backend == "lpai" and not _has_host_library(sdk_root, "libQnnLpai.so"):
        raise MissingToolError(
            f"the lpai backend of {soc.name} needs a QNN SDK{_looked(sdk_root, 'libQnnLpai.so')}: pip has no "
            f"libQnnLpai.so; {_GET_SDK}, 2.39 or newer, and attach a rooted device: there is no LPAI simulator"
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
    kind: Literal["simulator", "android"],
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
    return Runtime(files, digest.hexdigest(), runner, known, kind, needs_root)


# ExecuTorch 1.5, examples/qualcomm/utils.py: what SimpleADB pushes for each backend.


def _android_libraries(soc: Soc, backend: str) -> tuple[str, ...]:
    if backend == "htp":
        return ("libQnnHtp.so", f"libQnnHtpV{soc.htp_arch}Stub.so", "libQnnHtpPrepare.so")
    if backend == "gpu":
        return ("libQnnGpu.so",)
    return ("libQnnLpai.so", "libQnnLpaiStub.so")


def _skel(soc: Soc, backend: str, sdk_root: Path) -> tuple[Path, ...]:
    if backend == "htp":
        folder = sdk_root / "lib" / f"hexagon-v{soc.htp_arch}" / "unsigned"
        return (folder / f"libQnnHtpV{soc.htp_arch}Skel.so",)
    if backend == "lpai":
        return (_lpai_folder(soc, sdk_root) / "signed" / "libQnnLpaiSkel.so",)
    return ()


def _lpai_folder(soc: Soc, sdk_root: Path) -> Path:
    return sdk_root / "lib" / f"lpai-v{soc.lpai_version}"


def _how(soc: Soc, backend: str, sdk_root: Path) -> str:
    text = f"{_GET_SDK} with {ANDROID_TARGET} libraries, and build runner and backend library with ExecuTorch"
    if backend == "lpai":
        text += f"; {_signing(_lpai_folder(soc, sdk_root))}"
    return text


def _signing(folder: Path) -> str:
    return (
        "sign the skel with the Hexagon SDK: $HEXAGON_SDK_ROOT/tools/elfsigner/elfsigner.py "
        f"-i {folder / 'unsigned' / 'libQnnLpaiSkel.so'} -o {folder / 'signed'}"
    )


def _check_machine(path: Path, machine: int) -> None:
    header = read_elf(path)
    if header.machine != machine:
        raise ConfigError(path, "", f"is made for {header.machine_name}, expected {MACHINES[machine]}")


def _check_skel(path: Path, soc: Soc, backend: str) -> None:
    _check_machine(path, HEXAGON)
    header = read_elf(path)
    if backend == "htp" and header.hexagon_arch != soc.htp_arch:
        raise ConfigError(
            path,
            "",
            f"is a skel for V{header.hexagon_arch} (e_flags {header.flags:#x}), {soc.name} needs V{soc.htp_arch}: "
            "the SDK's files are mixed up; unpack it again",
        )
    if backend == "lpai" and not header.signed:
        raise ConfigError(path, "", f"is not signed and LPAI loads signed skels only: {_signing(path.parent.parent)}")


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
