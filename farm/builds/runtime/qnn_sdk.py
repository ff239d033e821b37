"""Places of QNN's files: in an SDK, in a wheel of onnxruntime-qnn, and laid out for this machine's simulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from farm.base.errors import InfraError, MissingToolError
from farm.base.files import published, require_own
from farm.base.hashes import hash_files, name_of
from farm.base.processes import ask_program
from farm.base.text import one_line
from farm.builds.runtime.native import (
    BRIDGE,
    OE_LINUX,
    NativeBuild,
    NativeExecutorch,
    build_native,
    require_build_machine,
)
from farm.builds.runtime.packages import fetch_wheel, install_hint, package_folder, package_version, wheel_folder

# Places of QNN's files: in an SDK, or in a wheel of onnxruntime-qnn, which has fewer of them in one folder.


ANDROID_FOLDER = "aarch64-android"
LINUX_FOLDER = "aarch64-oe-linux-gcc*"
GET_SDK = "set QNN_SDK_ROOT to a QNN SDK from Qualcomm (Qualcomm AI Engine Direct)"

WHEEL = "onnxruntime-qnn"
"""Distribution with QNN's libraries."""
MAVEN = "com.qualcomm.qti:qnn-runtime"
"""Maven artifact with QNN's libraries for Android."""
_PRODUCT_LIMIT = 60
ORIGIN = "farm-fetched.json"
"""File in the folder of an SDK that farm fetched."""


class FetchedSdk(msgspec.Struct, frozen=True):
    """Record of farm in the folder of a fetched SDK."""

    version: str
    origin: str
    """The address of the archive, or the package: `onnxruntime-qnn 2.5.0`."""
    sha256: str
    """SHA-256 of the archive or the wheel."""
    fetched_ms: int
    licence_accepted: bool = False


class QnnFiles(msgspec.Struct, frozen=True):
    """Places of QNN's files for a kind of device; all files come from one place, as versions must not be mixed."""

    get: str
    """Way to get missing files."""
    root: Path | None = None
    """Folder of the SDK; None for the wheel, or without a configured SDK."""
    libraries: Path | None = None
    """Folder of the libraries for the device's processor."""
    version: str = ""
    wheel: bool = False

    @property
    def of_sdk(self) -> QnnFiles:
        """Files of the SDK; no files in place of the wheel's, which are for HTP and GPU only."""
        return QnnFiles(f"{GET_SDK} with {LINUX_FOLDER} libraries") if self.wheel else self

    def library(self, name: str) -> Path | None:
        """Return the expected path of a library for the device's processor."""
        return self.libraries / name if self.libraries else None

    def dsp(self, folder: str, name: str, kind: str = "unsigned") -> Path | None:
        """Return the expected path of a file for a DSP; `kind` is `signed` or `unsigned`."""
        if self.root is not None:
            return self.root / "lib" / folder / kind / name
        return self.library(name) if self.wheel else None


def android_files(sdk_root: Path | None) -> QnnFiles:
    """Return QNN's files for Android. The wheel's libraries are linked with glibc, which Android does not have."""
    get = f"{GET_SDK} with {ANDROID_FOLDER} libraries, or run 'farm setup sdk fetch --source maven'"
    if sdk_root is None:
        return QnnFiles(get)
    return QnnFiles(get, sdk_root, sdk_root / "lib" / ANDROID_FOLDER, sdk_version(sdk_root))


def linux_files(sdk_root: Path | None, cache_dir: Path) -> QnnFiles:
    """Return QNN's files for Arm Linux: the newest of the SDK; without an SDK the wheel's, even if not fetched yet.

    For an SDK that was made from a wheel, the files come from the same release of the wheel.
    """
    release = wheel_release(sdk_root)
    if sdk_root is not None and not release:
        folder = newest_linux_folder(sdk_root) or sdk_root / "lib" / LINUX_FOLDER
        return QnnFiles(f"{GET_SDK} with {LINUX_FOLDER} libraries", sdk_root, folder, sdk_version(sdk_root))
    try:
        libraries = wheel_folder(cache_dir, WHEEL, release) / "onnxruntime_qnn"
        require_own(libraries.parent)
    except MissingToolError as error:
        return QnnFiles(repair_of(error))
    get, version = f"farm setup runtime build --target {OE_LINUX}", f"{WHEEL} {release or package_version(WHEEL)}"
    return QnnFiles(get, None, libraries, version, wheel=True)


def fetch_linux_files(cache_dir: Path, sdk_root: Path | None = None) -> Path:
    """Return the folder with QNN's libraries for Arm Linux: the SDK's, else the wheel's, fetched if needed.

    Raises MissingToolError, also for an SDK that has none.
    """
    release = wheel_release(sdk_root)
    if sdk_root is not None and not release:
        if (folder := newest_linux_folder(sdk_root)) is not None:
            return folder
        raise MissingToolError(f"the QNN SDK {sdk_root} has no lib/{LINUX_FOLDER}: name another SDK, or none")
    return fetch_wheel(cache_dir, WHEEL, release) / "onnxruntime_qnn"


def fetched_sdk(root: Path) -> FetchedSdk | None:
    """Return farm's record of a fetched SDK; None for another SDK."""
    try:
        return msgspec.json.decode((root / ORIGIN).read_bytes(), type=FetchedSdk)
    except (OSError, msgspec.DecodeError):
        return None


def require_archive(root: Path, sha256: str) -> Path:
    """Return a fetched SDK; `sha256` is the expected hash of its archive, empty if unknown. Raises InfraError."""
    noted = fetched_sdk(root)
    found = noted.sha256 if noted is not None else ""
    if sha256 and found != sha256.lower():
        what = f"an archive with the SHA-256 {found}" if found else "an unknown archive"
        raise InfraError(f"{root} is from {what}, expected {sha256.lower()}: remove the folder and fetch it again")
    return root


def wheel_release(sdk_root: Path | None) -> str:
    """Return the release of the wheel that an SDK was made from, "" for another SDK."""
    noted = fetched_sdk(sdk_root) if sdk_root is not None else None
    found = re.fullmatch(rf"{WHEEL} (\d[\w.]{{0,40}})", noted.origin) if noted else None
    return found[1] if found else ""


def newest_linux_folder(sdk_root: Path | None) -> Path | None:
    """Return the library folder of an SDK for Arm Linux with the newest compiler; None without such a folder."""
    folders = [path for path in (sdk_root / "lib").glob(LINUX_FOLDER) if path.is_dir()] if sdk_root else []
    return max(folders, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def sdk_version(sdk_root: Path | None) -> str:
    """Return the version in an SDK's metadata, else the name of its folder; "" without an SDK."""
    if sdk_root is None:
        return ""
    # QAIRT SDKs carry `version: 2.47.0.260601` in sdk.yaml and are unpacked into a folder named so.
    return sdk_field(sdk_root, "version") or sdk_root.name


def sdk_product(sdk_root: Path | None) -> str:
    """Return the product name in the sdk.yaml of an SDK, in one line; "" without one."""
    return one_line(sdk_field(sdk_root, "product"), _PRODUCT_LIMIT) if sdk_root is not None else ""


def sdk_field(sdk_root: Path, key: str) -> str:
    """Return the value of a key of sdk.yaml; "" without the key."""
    try:
        lines = (sdk_root / "sdk.yaml").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip(" '\"") for line in lines if line.startswith(f"{key}:")), "")


def release_of(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, None for other text."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", version)
    return (int(found[1]), int(found[2])) if found else None


def repair_of(error: MissingToolError) -> str:
    """Return what to do about it: messages of this kind end in that."""
    return str(error).rpartition(": ")[2]


# The QNN libraries of this machine, laid out as the SDK folder that ExecuTorch looks for.
#
# ExecuTorch 1.5 opens `$QNN_SDK_ROOT/lib/x86_64-linux-clang/lib*.so`. The onnxruntime-qnn wheel has these libraries,
# the HTP simulator among them, but not this layout; and libraries from QNN 2.47 on need the bridge of native_runner/.


TARGET = "x86_64-linux-clang"
LIBRARY = "libQnnHtp.so"

# The bridge decides by the same number: native_runner/bridge/qnn_bridge.cpp.
_FIRST_BRIDGED_CORE_API = (2, 36)

# Name by which the runner writes an ETDump without a flag, as upstream's tools expect.
_UPSTREAM_RUNNER = "qnn_executor_runner"
_MARKER = "farm-sdk.json"
# Part of every key: another layout needs another number, and so another folder.
_LAYOUT = "2"
_PROBE_SECONDS = 120


class HostSdk(msgspec.Struct, frozen=True):
    """QNN libraries that the compiler and the simulator of this machine can load."""

    root: Path
    lib_dir: Path
    qnn_version: str
    """Build id of the library, `v2.51.0.260929181845`."""
    bridged: bool
    """`libQnnHtp.so` in `lib_dir` is the bridge, `real/libQnnHtp.so` the library."""

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that a process must start with: QNN_SDK_ROOT and LD_LIBRARY_PATH."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        path = f"{self.lib_dir}:{before}" if before else str(self.lib_dir)
        return MappingProxyType({"QNN_SDK_ROOT": str(self.root), "LD_LIBRARY_PATH": path})


class _Libraries(msgspec.Struct, frozen=True):
    """Folders whose libraries make up one set; `library` is the HTP library among them."""

    folders: tuple[Path, ...]
    library: Path
    sdk_root: Path | None


class _Probed(msgspec.Struct, frozen=True):
    core_api: tuple[int, int, int]
    build_id: str


def host_sdk(cache_dir: Path, *, sdk_root: Path | None = None, native: NativeBuild | None = None) -> HostSdk:
    """Return the SDK folder of this machine: `sdk_root`, else the libraries of the onnxruntime-qnn wheel.

    Libraries that need the bridge are laid out anew below `cache_dir`, with the bridge of `native` in front, the build
    for this machine; without it the first call builds bridge and runner. Raises MissingToolError, also for an
    `sdk_root` that is not there or has no libraries for this machine.
    """
    source = _source(sdk_root)
    if source.sdk_root is not None and (source.sdk_root / _MARKER).is_file():
        # A process that was given our own layout: to bridge it once more would undo the bridge.
        laid_out = _read_marker(source.sdk_root)
        # The links of a layout may lead to other libraries by now.
        real = _Libraries((laid_out.lib_dir,), laid_out.lib_dir / "real" / LIBRARY, None)
        return msgspec.structs.replace(laid_out, qnn_version=_probe(cache_dir, real, _key(cache_dir, real)).build_id)
    key = _key(cache_dir, source)
    probed = _probe(cache_dir, source, key)
    if source.sdk_root is not None and probed.core_api[:2] < _FIRST_BRIDGED_CORE_API:
        return HostSdk(source.sdk_root, source.library.parent, probed.build_id, bridged=False)
    native = native or build_native(cache_dir)
    # The bridge does not depend on the ExecuTorch of the runner beside it.
    bridge = hash_files(cache_dir, [native.bridge])[native.bridge]
    folder = cache_dir / "sdk" / name_of(_LAYOUT, key, bridge, *map(str, source.folders))
    return _read_marker(published(folder, lambda partial: _lay_out(partial, source, native, probed.build_id)))


def library_version(cache_dir: Path, library: Path) -> str:
    """Return the build id of an HTP library for this machine; the first call loads the library in a process.

    Raises MissingToolError for a library that does not load.
    """
    source = _Libraries((library.parent,), library, None)
    return _probe(cache_dir, source, _key(cache_dir, source)).build_id


def require_host_libraries(root: Path, named: str) -> None:
    """Raise MissingToolError unless an SDK can compile and simulate here; the message calls it by the text `named`."""
    instead = f"name a QNN SDK that has it, or name none to use the wheel's libraries ({install_hint('simulator')})"
    if not root.is_dir():
        raise MissingToolError(f"{named}: there is no such folder as the QNN SDK {root}: {instead}")
    if not (root / "lib" / TARGET / LIBRARY).is_file():
        raise MissingToolError(f"{named}: the QNN SDK {root} has no lib/{TARGET}/{LIBRARY} to compile with: {instead}")


def package_libraries(sdk_root: Path | None) -> tuple[Path, ...]:
    """Return the folders that `host_sdk` takes libraries from, loading none. Raises MissingToolError."""
    return _source(sdk_root).folders


def outside_environment(cache_dir: Path, sdk_root: Path | None, executorch: NativeExecutorch) -> dict[str, str]:
    """Return QNN_SDK_ROOT, LD_LIBRARY_PATH and QNN_EXECUTOR_RUNNER; the first call builds the runner and the bridge.

    A process must start with these variables. The current entries of LD_LIBRARY_PATH follow farm's. Raises
    MissingToolError, InfraError.
    """
    native = build_native(cache_dir, executorch=executorch)
    sdk = host_sdk(cache_dir, sdk_root=sdk_root, native=native)
    libraries = executorch.libraries
    ours = [str(sdk.lib_dir), str(libraries)]
    # A second evaluation gives the same.
    before = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path and path not in ours]
    return {
        "QNN_SDK_ROOT": str(sdk.root),
        "LD_LIBRARY_PATH": ":".join([*ours, *before]),
        "QNN_EXECUTOR_RUNNER": str(_standalone(cache_dir, native.runner, native.key, libraries)),
    }


def _source(sdk_root: Path | None) -> _Libraries:
    require_build_machine("QNN's compiler and HTP simulator run")
    if sdk_root is not None:
        root = sdk_root.absolute()
        require_host_libraries(root, _named_by(root))
        return _Libraries((root / "lib" / TARGET,), root / "lib" / TARGET / LIBRARY, root)
    try:
        package = package_folder("onnxruntime_qnn", LIBRARY, "simulator")
    except MissingToolError as error:
        raise MissingToolError(f"{error}, or set QNN_SDK_ROOT to a QNN SDK (one with lib/{TARGET}/{LIBRARY})") from None
    # auditwheel's folder for the C++ runtime that the libraries were linked with.
    companions = package.with_name(f"{package.name}.libs")
    if not companions.is_dir():
        raise MissingToolError(f"{companions} is missing: {install_hint('simulator')} --force-reinstall")
    return _Libraries((package, companions), package / LIBRARY, None)


def _named_by(root: Path) -> str:
    """Return the setting that names an SDK, for a message: `config` does not keep whether the environment set it."""
    variable = os.environ.get("QNN_SDK_ROOT")
    if variable and Path(variable).expanduser().absolute() == root:
        return f"QNN_SDK_ROOT={variable}"
    return "sdk_root in the [qnn] table of farm.toml"


def _libraries(source: _Libraries) -> list[Path]:
    return sorted(path for folder in source.folders for path in folder.iterdir() if ".so" in path.suffixes)


def _key(cache_dir: Path, source: _Libraries) -> str:
    """Return the hash of a set of libraries: the same ones in another place have the same."""
    libraries = [source.library, *_libraries(source)]
    try:
        hashes = hash_files(cache_dir, libraries)
    except OSError as error:
        raise MissingToolError(f"{error.filename} cannot be read: {error.strerror}: unpack the QNN SDK anew") from None
    return name_of(_LAYOUT, *(part for path in libraries for part in (path.name, hashes[path])))


def _probe(cache_dir: Path, source: _Libraries, key: str) -> _Probed:
    def ask(folder: Path) -> None:
        try:
            program = Path(__file__).with_name("library_probe.py")
            environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, source.folders))}
            answer = ask_program([sys.executable, "-I", "-S", program, source.library], _PROBE_SECONDS, environment)
        except subprocess.TimeoutExpired:
            raise MissingToolError(f"{source.library} does not load within {_PROBE_SECONDS} s") from None
        lines = [line for line in answer.output.splitlines() if line.startswith('{"core_api"')]
        if answer.code != 0 or not lines:
            raise MissingToolError(
                f"{source.library} cannot be loaded: {answer.reason}: use a QNN SDK for this machine, "
                f"or unset QNN_SDK_ROOT to use the wheel's libraries ({install_hint('simulator')})"
            )
        (folder / "probe.json").write_text(lines[-1])

    folder = published(cache_dir / "sdk" / f"probe-{key}", ask)
    return msgspec.json.decode((folder / "probe.json").read_bytes(), type=_Probed)


def _lay_out(folder: Path, source: _Libraries, native: NativeBuild, version: str) -> None:
    lib_dir = folder / "lib" / TARGET
    (lib_dir / "real").mkdir(parents=True)
    (lib_dir / "real" / LIBRARY).symlink_to(source.library)
    # A copy: the bridge looks for the real library beside itself.
    shutil.copy2(native.bridge, lib_dir / BRIDGE)
    for path in _libraries(source):
        if path.name != LIBRARY:
            (lib_dir / path.name).symlink_to(path)
    if source.sdk_root is not None:
        _link_all_but(source.sdk_root, folder, "lib")
        _link_all_but(source.sdk_root / "lib", folder / "lib", TARGET)
    (folder / _MARKER).write_text(json.dumps({"qnn_version": version}))


def _link_all_but(source: Path, folder: Path, name: str) -> None:
    for path in source.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)


def _read_marker(root: Path) -> HostSdk:
    require_own(root)
    version = json.loads((root / _MARKER).read_text())["qnn_version"]
    return HostSdk(root, root / "lib" / TARGET, str(version), bridged=True)


def _standalone(cache_dir: Path, runner: Path, key: str, libraries: Path) -> Path:
    """Return a runner with ExecuTorch's libraries beside it.

    Upstream's tests replace LD_LIBRARY_PATH when they start it, and the runner looks beside itself.
    """
    where = name_of(_UPSTREAM_RUNNER, key, str(libraries))

    def lay_out(folder: Path) -> None:
        # A copy, because the runner looks for libraries beside the target of a link.
        shutil.copy2(runner, folder / _UPSTREAM_RUNNER)
        for library in libraries.glob("libexecutorch*.so"):
            (folder / library.name).symlink_to(library)

    return published(cache_dir / "outside" / where, lay_out) / _UPSTREAM_RUNNER
