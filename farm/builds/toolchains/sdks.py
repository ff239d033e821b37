"""QNN by version: the SDKs of this machine (the wheel of farm's environment, the cache, a path), and their names."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.config.settings import Config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import FarmError, MissingToolError, UsageError
from farm.base.files import require_own, withdraw
from farm.base.socs import load_socs
from farm.builds.bundles.cache import folder_size
from farm.builds.runtime.packages import package_folder, package_version
from farm.builds.runtime.qnn_sdk import (
    ANDROID_FOLDER,
    LIBRARY,
    MAVEN,
    ORIGIN,
    TARGET,
    WHEEL,
    fetched_sdk,
    require_host_libraries,
    sdk_version,
)
from farm.builds.runtime.runtime import require_backend

# Versions with one to four numbers: `2.49`, `v2.49.40`, `2.49.40.260810104044`.
_VERSION = re.compile(r"v?(\d{1,15}(?:\.\d{1,15}){0,3})")
# File of the wheel with its QNN version; the whole build id is in its libraries.
_WHEEL_FILE = "build_and_package_info.py"
_WHEEL_VERSION = re.compile(r"^qnn_version = '(\d+(?:\.\d+)+)'$", re.MULTILINE)
_SHORT = {TARGET: "x86_64", ANDROID_FOLDER: "android"}
_NATIVE = {
    "android-arm64": ("executorch_build", "android_executorch"),
    "oe-linux-aarch64": ("executorch_linux_build",),
    "direct": ("executorch_direct_build",),
    "linux-x86_64": (),
}
# Settings of files that were made with another ExecuTorch than the toolchain's.
_NAMED_FILES = ("android_runner", "android_backend_library")


class QnnSdk(msgspec.Struct, frozen=True):
    """QNN SDK on this machine."""

    version: str
    root: Path | None
    """Folder of the SDK; None for the wheel in farm's environment, whose libraries are laid out on use."""
    origin: str
    """Origin of a fetched SDK: an address, or `onnxruntime-qnn 2.5.0`."""


class SdkState(QnnSdk, frozen=True):
    """QNN SDK on this machine, with the targets and backends that it supports."""

    targets: tuple[str, ...]
    """Targets of its libraries: `x86_64`, `android`, `oe-linux`, `hexagon v75`."""
    backends: tuple[str, ...]
    """Backends for which it can compile on at least one SoC."""
    nbytes: int
    default: bool
    """True for the SDK of toolchains that name none."""
    problem: str = ""


def resolve_qnn(config: Config, text: str) -> Path | None:
    """Return the SDK that `text` names, a version or an absolute path; None for the wheel in farm's environment.

    Raises UsageError for other texts, MissingToolError for an SDK that is missing or cannot compile on this machine.
    """
    if "/" in text:
        require_host_libraries(Path(text), text)
        return Path(text)
    wanted = require_version(text)
    found = list(_compilers(config, wanted))
    if not found:
        known = ", ".join(sdk.version for sdk in installed_sdks(config)) or "none"
        raise MissingToolError(
            f"QNN {text} is not on this machine, there is {known}: run 'farm setup sdk fetch {wanted}', "
            "or name the folder of a QNN SDK"
        )
    chosen = max(found, key=lambda sdk: (version_numbers(sdk.version), sdk.root is None))
    if chosen.root is not None:
        require_own(chosen.root)
        require_host_libraries(chosen.root, text)
        with contextlib.suppress(OSError):
            # The time of the last use, for farm setup cache prune --older.
            os.utime(chosen.root / ORIGIN)
    return chosen.root


def require_version(text: str) -> str:
    """Return a version in the form of SDK names, without the v of libraries. Raises UsageError for other text."""
    wanted = _VERSION.fullmatch(text.strip())
    if wanted is None:
        raise UsageError(f"QNN {text!r} is neither a version such as 2.49 nor a path to a QNN SDK")
    return wanted[1]


def find_cached(config: Config, version: str) -> Path | None:
    """Return the newest SDK in the cache with `version`."""
    return next((sdk.root for sdk in _compilers(config, version) if sdk.root is not None), None)


def _compilers(config: Config, version: str) -> Iterator[QnnSdk]:
    """Yield the SDKs of `version` that are more than libraries for devices, newest first."""
    return (sdk for sdk in installed_sdks(config) if is_version(sdk.version, version) and not _is_runtime(sdk))


def _is_runtime(sdk: QnnSdk) -> bool:
    """Return whether an SDK has libraries for devices only."""
    return sdk.origin.startswith(MAVEN)


def sdk_states(config: Config) -> list[SdkState]:
    """Return every QNN of this machine: the SDK of [qnn] and QNN_SDK_ROOT, the SDKs of the cache, the wheel."""
    named = config.sdk_root
    states = [_state(sdk, default=sdk.root == named) for sdk in installed_sdks(config)]
    if named is not None and all(state.root != named for state in states):
        sdk = QnnSdk(sdk_version(named), named, str(named))
        states.insert(0, _state(sdk, default=True))
    return states


def _state(sdk: QnnSdk, *, default: bool) -> SdkState:
    root, problem, backends = sdk.root, "", list[str]()
    if not _is_runtime(sdk):
        try:
            if root is not None:
                require_host_libraries(root, f"QNN {sdk.version}")
            backends = [name for name in BACKENDS if not find_backend(name).on_cpu and _compiles(name, root)]
        except MissingToolError as error:
            problem = str(error)
    folder = package_folder("onnxruntime_qnn", LIBRARY, "simulator") if root is None else root
    targets = ("x86_64",) if root is None else _targets(root)
    origin = sdk.origin if root is not None else f"{sdk.origin}, installed"
    nbytes = folder_size(folder)[1]
    return SdkState(sdk.version, root, origin, targets, tuple(backends), nbytes, default, problem)


def _compiles(backend: str, root: Path | None) -> bool:
    for soc in load_socs().values():
        if backend in soc.backends:
            with contextlib.suppress(MissingToolError):
                require_backend(soc, backend, root)
                return True
    return False


def _targets(root: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in (root / "lib").glob("*") if path.is_dir())
    found = [short for name, short in _SHORT.items() if name in names]
    found += ["oe-linux"] if any(name.startswith("aarch64-oe-linux") for name in names) else []
    # `hexagon-v75`, and the same of other processors.
    numbered = [one.groups() for name in names if (one := re.fullmatch(r"([a-z]+)-v(\d{1,4})", name))]
    for kind in dict.fromkeys(kind for kind, _ in numbered):
        versions = sorted(int(number) for one, number in numbered if one == kind)
        last = f"-v{versions[-1]}" if len(versions) > 1 else ""
        found.append(f"{kind} v{versions[0]}{last}")
    return tuple(found)


def installed_sdks(config: Config) -> list[QnnSdk]:
    """Return the QNN of farm's environment and of the cache, newest first."""
    roots = [path.parent for path in sdks_folder(config.cache_dir).glob("*/sdk.yaml")]
    found = [QnnSdk(sdk_version(root), root, one.origin if (one := fetched_sdk(root)) else "") for root in roots]
    if version := wheel_version():
        found.append(QnnSdk(version, None, f"{WHEEL} {package_version(WHEEL)}"))
    return sorted(found, key=lambda sdk: version_numbers(sdk.version), reverse=True)


def sdks_folder(cache_dir: Path) -> Path:
    """Return the folder of fetched SDKs, each in a folder with the name of its version."""
    return cache_dir / "sdks"


def wheel_version() -> str:
    """Return the version of QNN in the wheel of farm's environment, such as `2.51.0`; empty without the wheel."""
    try:
        folder = package_folder("onnxruntime_qnn", LIBRARY, "simulator")
    except MissingToolError:
        return ""
    return version_in_wheel(folder)


def version_in_wheel(folder: Path) -> str:
    """Return the version of QNN in the metadata of an unpacked wheel, empty without one."""
    try:
        text = (folder / _WHEEL_FILE).read_text(errors="replace")
    except OSError:
        return ""
    found = _WHEEL_VERSION.search(text)
    return found[1] if found else ""


def is_version(version: str, wanted: str) -> bool:
    """Return whether `version`, of a library or an SDK, matches `wanted`, which may be shorter."""
    parts = wanted.removeprefix("v").split(".")
    return version.removeprefix("v").split(".")[: len(parts)] == parts


def native_fields(toolchain: ToolchainConfig) -> dict[str, Path | None]:
    """Return the fields of Config that the `native` folders of a toolchain set.

    Raises UsageError for an unknown target, and for a missing folder.
    """
    fields: dict[str, Path | None] = {}
    for target, folder in toolchain.native.items():
        key = f"toolchain.{toolchain.name}: native.{target}"
        if target not in _NATIVE:
            raise UsageError(f"{key}: there is no such target, legal are {', '.join(_NATIVE)}")
        if not folder.is_dir():
            raise UsageError(f"{key}: {folder} is no folder: build ExecuTorch for {target} there, or leave the key out")
        fields |= dict.fromkeys(_NATIVE[target], folder)
        if target == "android-arm64":
            fields |= dict.fromkeys(_NAMED_FILES)
    return fields


def version_numbers(version: str) -> list[int]:
    """Return the numbers of a version, in the order in which versions are compared."""
    return [int(part) for part in re.findall(r"\d+", version)]


class CachedSdk(msgspec.Struct, frozen=True):
    """SDK that farm fetched into the cache."""

    version: str
    root: Path
    nbytes: int
    used_ms: int
    """Time of the last use by a toolchain, or of the download, epoch milliseconds."""
    named: bool
    """True for an SDK that farm.toml names, so that it stays."""


def cached_sdks(config: Config) -> list[CachedSdk]:
    """Return the SDKs in the cache, newest version first."""
    named = set(_named(config))
    return [
        CachedSdk(sdk.version, sdk.root, folder_size(sdk.root)[1], _used_ms(sdk.root), sdk.root in named)
        for sdk in installed_sdks(config)
        if sdk.root is not None
    ]


def removable_sdks(config: Config, older_than_s: float | None) -> list[CachedSdk]:
    """Return the SDKs without use for `older_than_s`, none for None; SDKs that farm.toml names always stay."""
    if older_than_s is None:
        return []
    horizon_ms = (time.time() - older_than_s) * 1000
    return [sdk for sdk in cached_sdks(config) if not sdk.named and sdk.used_ms <= horizon_ms]


def remove_sdk(config: Config, sdk: CachedSdk) -> None:
    """Remove an SDK, and the layouts whose links lead to its libraries."""
    withdraw(sdk.root)
    (sdks_folder(config.cache_dir) / f"{sdk.root.name}.lock").unlink(missing_ok=True)
    for folder in (config.cache_dir / "sdk").glob(f"*/lib/{TARGET}/real"):
        if (folder / LIBRARY).is_symlink() and not (folder / LIBRARY).exists():
            shutil.rmtree(folder.parents[2], ignore_errors=True)


def _used_ms(root: Path) -> int:
    with contextlib.suppress(OSError):
        return int((root / ORIGIN).stat().st_mtime * 1000)
    return 0


def _named(config: Config) -> list[Path]:
    found = [root for root in (config.sdk_root, config.android_qnn) if root is not None]
    for toolchain in config.toolchains.values():
        if toolchain.qnn:
            with contextlib.suppress(FarmError):
                found += [root for root in [resolve_qnn(config, toolchain.qnn)] if root is not None]
    return found
