"""A device's address -> its transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.devices.device import AdbAddress
from farm.errors import DeviceError

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.devices.transport import Transport


def open_transport(device: Device) -> Transport:
    """Return a transport to `device`; nothing is connected before it is used. Close it."""
    from farm.devices.adb import AdbTransport

    address = device.address
    if not isinstance(address, AdbAddress):
        raise DeviceError(device.serial, "only devices behind adb can be used")
    return AdbTransport(device.serial, address.port)
