"""QNN by version: what is there (the wheel of farm's environment, the cache, a path), and what a name stands for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.errors import MissingToolError, UsageError
from farm.runtime.packages import package_folder, package_version
from farm.runtime.qnn_sdk import sdk_version
from farm.runtime.simulator import LIBRARY, require_host_libraries
from farm.system.trust import require_own

if TYPE_CHECKING:
    from farm.config.settings import Config
    from farm.config.toolchains import ToolchainConfig

WHEEL = "onnxruntime-qnn"
# As many numbers as people write: `2.49`, `v2.49.40`, `2.49.40.260810104044`.
_VERSION = re.compile(r"v?(\d{1,15}(?:\.\d{1,15}){0,3})")
# What the wheel says about itself; its libraries have the whole build id.
_WHEEL_FILE = "build_and_package_info.py"
_WHEEL_VERSION = re.compile(r"^qnn_version = '(\d+(?:\.\d+)+)'$", re.MULTILINE)
_NATIVE = {
    "android-arm64": ("executorch_build", "android_executorch"),
    "oe-linux-aarch64": ("executorch_linux_build",),
    "direct": ("executorch_direct_build",),
    "linux-x86_64": (),
}
# Made with another ExecuTorch than the toolchain's.
_NAMED_FILES = ("android_runner", "android_backend_library")


class QnnSdk(msgspec.Struct, frozen=True):
    """One QNN that is on this machine."""

    version: str
    root: Path | None
    """None for the wheel in farm's environment, whose libraries are laid out where they are needed."""
    origin: str
    """Where it comes from, in a word or two."""


def resolve_qnn(config: Config, text: str) -> Path | None:
    """Return the SDK that `text` names, a version or an absolute path; None for the wheel in farm's environment.

    Raises UsageError for what is neither, MissingToolError for what is not there or cannot compile on this machine.
    """
    if "/" in text:
        require_host_libraries(Path(text), text)
        return Path(text)
    wanted = _VERSION.fullmatch(text.strip())
    if wanted is None:
        raise UsageError(f"QNN {text!r}: is neither a version such as 2.49 nor a path to a QNN SDK")
    there = installed_sdks(config)
    found = [sdk for sdk in there if _is_of(sdk.version, wanted[1])]
    if not found:
        known = ", ".join(sdk.version for sdk in there) or "none"
        raise MissingToolError(
            f"QNN {text} is not on this machine, there is {known}: run 'farm sdk fetch {wanted[1]}', "
            "or name the folder of a QNN SDK"
        )
    chosen = max(found, key=lambda sdk: (_numbers(sdk.version), sdk.root is None))
    if chosen.root is not None:
        require_own(chosen.root)
        require_host_libraries(chosen.root, text)
    return chosen.root


def installed_sdks(config: Config) -> list[QnnSdk]:
    """Return the QNN of farm's environment and of the cache, newest first."""
    found = [QnnSdk(sdk_version(root), root, "cache") for root in _cached(config.cache_dir)]
    if version := wheel_version():
        found.append(QnnSdk(version, None, f"{WHEEL} {package_version(WHEEL)}"))
    return sorted(found, key=lambda sdk: _numbers(sdk.version), reverse=True)


def sdks_folder(cache_dir: Path) -> Path:
    """Return where SDKs are kept that farm fetched, each in a folder that is called as its version."""
    return cache_dir / "sdks"


def wheel_version() -> str:
    """Return the version of QNN in the wheel of farm's environment, such as `2.51.0`; empty without the wheel."""
    try:
        folder = package_folder("onnxruntime_qnn", LIBRARY, "simulator")
    except MissingToolError:
        return ""
    return version_in_wheel(folder)


def version_in_wheel(folder: Path) -> str:
    """Return the version of QNN that an unpacked wheel says it has, empty where it does not say."""
    try:
        text = (folder / _WHEEL_FILE).read_text(errors="replace")
    except OSError:
        return ""
    found = _WHEEL_VERSION.search(text)
    return found[1] if found else ""


def native_fields(toolchain: ToolchainConfig) -> dict[str, Path | None]:
    """Return the fields of Config that the `native` folders of a toolchain stand for.

    Raises UsageError for a target that no folder can be given for, and for a folder that is not there.
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


def _cached(cache_dir: Path) -> list[Path]:
    return [path.parent for path in sdks_folder(cache_dir).glob("*/sdk.yaml")]


def _is_of(version: str, wanted: str) -> bool:
    parts = wanted.split(".")
    return _plain(version).split(".")[: len(parts)] == parts


def _plain(version: str) -> str:
    return version.removeprefix("v")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
