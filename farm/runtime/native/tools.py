"""The tools of this machine, their versions and where they are; starts none of them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec

from farm.errors import FarmError
from farm.runtime.device_files import BACKEND_IN_BUILD, SKEL_IN_BUILD, android_kit
from farm.runtime.native.build import planned_native
from farm.runtime.native.targets import HOST, TARGETS
from farm.runtime.packages import package_version
from farm.runtime.qnn_sdk import newest_linux_folder, sdk_version
from farm.runtime.signing.elfsigner import ELFSIGNER

if TYPE_CHECKING:
    from pathlib import Path

    from farm.config.settings import Config

_PACKAGES = ("executorch", "torch", "torchao", "onnxruntime-qnn", "cmake", "ninja", "adbutils")
_COMPILERS = ("c++", "aarch64-linux-gnu-g++", "qemu-aarch64")
_TOOLS_LIBRARIES = "Tools/target/hexagon/lib"


class Tool(msgspec.Struct, frozen=True):
    """One tool, or a set of files that somebody else made."""

    name: str
    version: str
    """Or what is known instead: `set`, `built`."""
    path: str
    problem: str = ""
    """What is wrong with it; "" when nothing is. What nobody asked for is no problem: then `version` is ""."""


def list_tools(config: Config) -> list[Tool]:
    """Return the tools of this machine, those that are not there with an empty version."""
    tools = [Tool(name, package_version(name), "") for name in _PACKAGES]
    tools += [Tool(name, "in PATH" if (path := shutil.which(name)) else "", path or "") for name in _COMPILERS]
    tools += [_runner(config, name) for name in TARGETS]
    tools.append(_adb())
    tools.append(_qnn_sdk(config.sdk_root))
    tools.append(_ndk(config.android_ndk_root))
    tools.append(_folder("ExecuTorch for Android", config.executorch_build, (BACKEND_IN_BUILD,)))
    tools.append(_folder("ExecuTorch for Arm Linux", config.executorch_linux_build, (BACKEND_IN_BUILD,)))
    direct = (BACKEND_IN_BUILD, SKEL_IN_BUILD)
    tools.append(_folder("ExecuTorch for direct mode", config.executorch_direct_build, direct))
    tools.append(_folder("Hexagon SDK", config.hexagon_sdk_root, (str(ELFSIGNER),)))
    tools.append(_folder("Hexagon tools", config.hexagon_tools_root, (_TOOLS_LIBRARIES,)))
    return tools


def _runner(config: Config, target: str) -> Tool:
    name = f"farm_runner for {target}"
    try:
        build = planned_native(config.cache_dir, target, android=android_kit(config))
    except FarmError:
        return Tool(name, "", "")
    if build.built:
        return Tool(name, "built", str(build.runner))
    return Tool(name, "not built" if target == HOST else "", "")


def _adb() -> Tool:
    from farm.runtime.packages import package_folder

    if path := shutil.which("adb"):
        return Tool("adb", "in PATH", path)
    try:
        return Tool("adb", "of adbutils", str(package_folder("adbutils", "binaries/adb", "build") / "binaries" / "adb"))
    except FarmError:
        return Tool("adb", "", "")


def _qnn_sdk(root: Path | None) -> Tool:
    if root is None:
        return Tool("QNN SDK", "", "")
    problem = "" if (root / "lib").is_dir() else "has no lib folder" if root.is_dir() else "does not exist"
    linux = newest_linux_folder(root)
    folders = [name for name in ("x86_64-linux-clang", "aarch64-android") if (root / "lib" / name).is_dir()]
    folders += [linux.name] if linux else []
    version = sdk_version(root)
    return Tool("QNN SDK", f"{version} ({', '.join(folders)})" if folders else version, str(root), problem)


def _ndk(root: Path | None) -> Tool:
    tool = _folder("Android NDK", root, ("build/cmake/android.toolchain.cmake",))
    try:
        lines = (root / "source.properties").read_text(errors="replace").splitlines() if root else []
    except OSError:
        return tool
    said = [line.partition("=")[2].strip() for line in lines if line.startswith("Pkg.Revision")]
    return msgspec.structs.replace(tool, version=said[0]) if said else tool


def _folder(name: str, root: Path | None, needed: tuple[str, ...]) -> Tool:
    if root is None:
        return Tool(name, "", "")
    lacking = next((path for path in needed if not (root / path).exists()), None)
    # Qualcomm's SDKs are unpacked into folders named by their version.
    return Tool(name, root.name, str(root), f"has no {lacking}" if lacking else "")
