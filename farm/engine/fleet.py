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
    """Return devices for every SoC: `virtual` new ones each, with their storage in `folder`, or the attached ones.

    Raises NoDeviceError for an SoC without a device, MissingToolError for a runtime that cannot be had.
    """
    if virtual:
        return _virtual(config, socs, virtual, supervisor, folder)
    return _attached(config, socs, backend)


def _virtual(config: Config, socs: Sequence[Soc], count: int, supervisor: Supervisor, folder: Path) -> Fleet:
    from farm.devices.adb_server import start_adb_server
    from farm.runtime.runtime import simulator_runtime
    from farm.virtual.boot import boot

    server = start_adb_server(supervisor, config.state_dir / "adb")
    devices = boot(supervisor, server, [soc.name for soc in socs for _ in range(count)], folder)
    runtime = simulator_runtime(config.cache_dir, sdk_root=config.sdk_root)
    return Fleet(devices, {soc.name: runtime for soc in socs})


def _attached(config: Config, socs: Sequence[Soc], backend: str) -> Fleet:
    from farm.devices.adb_server import ordinary_server
    from farm.devices.discovery import scan
    from farm.runtime.runtime import android_runtime

    found = scan(ordinary_server(start=True).port)
    names = {soc.name for soc in socs}
    devices = [device for device in found.devices if device.soc in names]
    lacking = sorted(names - {device.soc for device in devices})
    if lacking:
        seen = [f"{device.serial} ({device.soc})" for device in found.devices]
        seen += [f"{device.serial} ({device.state}: {device.reason})" for device in found.unusable]
        raise NoDeviceError(
            f"no attached device is a {' or a '.join(lacking)}: attached are {', '.join(seen) or 'none'}; "
            "attach one, or use the simulator with '--virtual 2'"
        )
    if config.sdk_root is None or config.android_runner is None or config.android_backend_library is None:
        raise MissingToolError(
            "an Android device needs a QNN SDK and a runner built for it: set sdk_root, android_runner and "
            "android_backend_library in the [qnn] table of farm.toml (docs/runtime.md says how)"
        )
    runtimes = {
        soc.name: android_runtime(
            soc,
            backend,
            config.sdk_root,
            config.android_runner,
            config.android_backend_library,
            config.cache_dir,
        )
        for soc in socs
    }
    return Fleet(devices, runtimes)
