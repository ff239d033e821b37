"""The devices of a run, and the runtime each needs: virtual ones are booted, attached ones are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.devices.discovery import Device
from farm.errors import MissingToolError, NoDeviceError
from farm.runtime.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.config import Config
    from farm.processes import Supervisor
    from farm.profiles import Soc


class Fleet(msgspec.Struct, frozen=True):
    """Devices, and the runtime by SoC."""

    devices: list[Device]
    runtimes: dict[str, Runtime]


def allocate(
    config: Config, socs: Sequence[Soc], virtual: int, backend: str, supervisor: Supervisor, folder: Path
) -> Fleet:
    """Return devices for every SoC: `virtual` new ones each, or those that are attached.

    Raises NoDeviceError for an SoC without a device, MissingToolError for a runtime that cannot be had.
    """
    if virtual:
        return _virtual(config, socs, virtual, supervisor, folder)
    return _attached(config, socs, backend)


def _virtual(config: Config, socs: Sequence[Soc], count: int, supervisor: Supervisor, folder: Path) -> Fleet:
    from farm.devices.adb_server import AdbServer
    from farm.runtime.runtime import simulator_runtime
    from farm.virtual.boot import boot

    server = AdbServer.start(supervisor, config.state_dir / "adb")
    devices = boot(supervisor, server, [soc.name for soc in socs for _ in range(count)], folder / "devices")
    runtime = simulator_runtime(config.cache_dir)
    return Fleet(devices, {soc.name: runtime for soc in socs})


def _attached(config: Config, socs: Sequence[Soc], backend: str) -> Fleet:
    from farm.devices.discovery import discover
    from farm.runtime.runtime import android_runtime

    found = discover()
    devices = [device for device in found.devices if device.soc in {soc.name for soc in socs}]
    for soc in socs:
        if not any(device.soc == soc.name for device in devices):
            others = ", ".join(f"{d.serial} ({d.soc})" for d in found.devices) or "none"
            reasons = "".join(f"; {problem}" for problem in found.problems)
            raise NoDeviceError(
                f"no attached device is a {soc.name}: attached are {others}{reasons}; "
                f"'--virtual N' runs on the simulator instead"
            )
    if config.sdk_root is None or config.android_runner is None or config.android_backend_library is None:
        raise MissingToolError(
            "an Android device needs a QNN SDK and a runner built for it: set sdk_root, android_runner and "
            "android_backend_library in the [qnn] table of farm.toml (docs/native_runner.md says how)"
        )
    runtimes = {
        soc.name: android_runtime(soc, backend, config.sdk_root, config.android_runner, config.android_backend_library)
        for soc in socs
    }
    return Fleet(devices, runtimes)
