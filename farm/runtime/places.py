"""Configuration -> where the files of a device's runtime are: the first place that has one, else how to get it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.errors import MissingToolError
from farm.runtime.file_lists import BACKEND_IN_BUILD, BACKEND_LIBRARY, RUNNER_IN_BUILD, UPSTREAM_RUNNER, Built, Places
from farm.runtime.native.build import planned_native
from farm.runtime.native.cross_compilers import AndroidKit
from farm.runtime.native.targets import ANDROID, OE_LINUX, RUNNER, BuildTarget
from farm.runtime.qnn_sdk import android_files, linux_files, repair_of

if TYPE_CHECKING:
    from pathlib import Path

    from farm.config.settings import Config

# Where an ExecuTorch build for Android installs it.
_PREFIX_LIBRARY = f"lib/executorch/backends/qualcomm/{BACKEND_LIBRARY}"
_SCRIPT = "backends/qualcomm/scripts/build.sh of ExecuTorch"
_GET_BUILD = (
    f"set FARM_EXECUTORCH_BUILD to the build-android folder that {_SCRIPT} makes, or executorch_build in the [qnn] "
    "table of farm.toml"
)
_GET_LINUX_BUILD = (
    "set FARM_EXECUTORCH_LINUX_BUILD to the folder of an ExecuTorch build for Arm Linux, or executorch_linux_build in "
    "the [qnn] table of farm.toml"
)


def android_kit(config: Config) -> AndroidKit:
    """Return where the parts of an Android build are, as far as the configuration says."""
    # build.sh installs into the folder that it builds in.
    return AndroidKit(config.android_ndk_root, config.android_executorch or config.executorch_build)


def device_places(config: Config, target: BuildTarget) -> Places:
    """Return where the files for the devices of `target` are."""
    return linux_places(config) if target.name == OE_LINUX else android_places(config)


def android_places(config: Config) -> Places:
    """Return where the files for Android devices are."""
    build = config.executorch_build
    return Places(
        qnn=android_files(config.sdk_root),
        runner=_android_runner(config),
        backend_library=_backend_library(config),
        build=build,
        get_build=_GET_BUILD,
        direct_build=config.executorch_direct_build,
        hexagon_tools=config.hexagon_tools_root,
    )


def linux_places(config: Config) -> Places:
    """Return where the files for Arm Linux devices with QNN are."""
    build = config.executorch_linux_build
    return Places(
        qnn=linux_files(config.sdk_root, config.cache_dir),
        runner=Built(build / RUNNER_IN_BUILD if build else None, _GET_LINUX_BUILD, name=UPSTREAM_RUNNER),
        backend_library=Built(build / BACKEND_IN_BUILD if build else None, _GET_LINUX_BUILD),
        build=build,
        get_build=_GET_LINUX_BUILD,
    )


def speaks_sessions(runner: Path) -> bool:
    """Whether a runner is farm's own, which alone takes jobs in a session: it says its name in every message."""
    return RUNNER.encode() in runner.read_bytes()


def _android_runner(config: Config) -> Built:
    if config.android_runner is not None:
        return Built(config.android_runner, "set android_runner in the [qnn] table of farm.toml (docs/runtime.md)")
    try:
        planned = planned_native(config.cache_dir, ANDROID, android=android_kit(config))
    except MissingToolError as error:
        get, absent = repair_of(error), "missing"
    else:
        if planned.built:
            return Built(planned.runner, "farm runtime build --target android-arm64", "not built")
        get, absent = "farm runtime build --target android-arm64", "not built"
    build = config.executorch_build
    if build is not None and (build / RUNNER_IN_BUILD).is_file():
        return Built(build / RUNNER_IN_BUILD, get)
    return Built(None, get, absent, name=RUNNER)


def _backend_library(config: Config) -> Built:
    if config.android_backend_library is not None:
        get = "set android_backend_library in the [qnn] table of farm.toml (docs/runtime.md)"
        return Built(config.android_backend_library, get)
    candidates = [config.executorch_build / BACKEND_IN_BUILD] if config.executorch_build else []
    candidates += [root / _PREFIX_LIBRARY for root in (config.android_executorch, config.executorch_build) if root]
    found = next((path for path in candidates if path.is_file()), None)
    return Built(found or next(iter(candidates), None), _GET_BUILD)
