"""Configuration + backend + SoC -> the runtime of an attached device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.errors import MissingToolError
from farm.runtime.native.targets import ANDROID, OE_LINUX, TARGETS, BuildTarget, Mode
from farm.runtime.places import device_places, speaks_sessions
from farm.runtime.runtime import Runtime, device_runtime, linux_runtime
from farm.suites.socs import CPU_BACKENDS

if TYPE_CHECKING:
    from farm.config.settings import Config
    from farm.suites.socs import Soc


def attached_runtime(config: Config, soc: Soc, backend: str, *, linux: bool = False) -> Runtime:
    """Return what an attached device with `soc` needs to run bundles of `backend` in a session of farm's.

    It runs Android, or `linux`, where the runner that farm builds has the CPU's backend only.

    Raises IllegalTargetError, MissingToolError that names every file that is not there and how to get it, ConfigError
    for one that is made for something else or is not signed as it must be.
    """
    if linux and backend in CPU_BACKENDS:
        return linux_runtime(config.cache_dir)
    runtime = staged_runtime(config, soc, backend, TARGETS[OE_LINUX if linux else ANDROID])
    if not speaks_sessions(runtime.files[runtime.runner]):
        raise MissingToolError(
            f"{runtime.files[runtime.runner]} is not farm's runner and takes no jobs in a session: "
            "farm runtime build --target android-arm64 (docs/runtime.md), or set android_runner in the [qnn] table of "
            "farm.toml"
        )
    return runtime


def staged_runtime(config: Config, soc: Soc, backend: str, target: BuildTarget, mode: Mode = "traditional") -> Runtime:
    """Return the files that a device needs, whether or not farm can run jobs with them. Raises as `attached_runtime`.

    Jobs run with farm's own runner alone, and so not in direct mode and not with QNN on Arm Linux.
    """
    return device_runtime(soc, backend, device_places(config, target), target.kind, config.cache_dir, mode)
