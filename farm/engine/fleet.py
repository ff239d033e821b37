"""The devices of a run, and the runtime each needs: virtual ones are booted, attached ones are found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from farm.devices.device import Device
from farm.errors import NoDeviceError
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

    Those whose runtime needs root have it. Raises NoDeviceError for an SoC without a device, MissingToolError for a
    runtime that cannot be had, DeviceError for a device that does not give root.
    """
    if virtual:
        fleet = _virtual(config, socs, virtual, backend, supervisor, folder)
    else:
        fleet = _attached(config, socs, backend)
    _give_root([device for device in fleet.devices if fleet.runtimes[device.soc].needs_root])
    return fleet


def _give_root(devices: Sequence[Device]) -> None:
    if not devices:
        return
    from farm.devices.root import ensure_root

    with ThreadPoolExecutor(max_workers=min(16, len(devices))) as pool:
        # Read to the end, so that what one of them raises is heard.
        list(pool.map(lambda device: ensure_root(device.serial, device.address.port), devices))


def _virtual(
    config: Config, socs: Sequence[Soc], count: int, backend: str, supervisor: Supervisor, folder: Path
) -> Fleet:
    from farm.devices.adb_server import start_adb_server
    from farm.runtime.runtime import simulator_runtime
    from farm.virtual.boot import boot

    # First, as it may be what is missing.
    runtimes = {soc.name: simulator_runtime(config.cache_dir, soc, backend, sdk_root=config.sdk_root) for soc in socs}
    server = start_adb_server(supervisor, config.state_dir / "adb")
    devices = boot(supervisor, server, [soc.name for soc in socs for _ in range(count)], folder)
    return Fleet(devices, runtimes)


def _attached(config: Config, socs: Sequence[Soc], backend: str) -> Fleet:
    from farm.devices.adb_server import ordinary_server
    from farm.devices.discovery import scan
    from farm.runtime.attached import attached_runtime

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
    return Fleet(devices, {soc.name: attached_runtime(config, soc, backend) for soc in socs})
