"""A device's address -> its transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.devices.device import LocalAddress, SshAddress

if TYPE_CHECKING:
    from farm.devices.device import Address, Device
    from farm.devices.transport import Transport


def open_transport(device: Device) -> Transport:
    """Return a transport to `device`; nothing is connected before it is used. Close it."""
    return transport_to(device.serial, device.address)


def transport_to(serial: str, address: Address) -> Transport:
    """Return a transport to what is at `address`, which errors call `serial`. Close it."""
    if isinstance(address, SshAddress):
        from farm.devices.ssh.transport import SshTransport

        return SshTransport(serial, address)
    if isinstance(address, LocalAddress):
        from farm.devices.local.transport import LocalTransport

        return LocalTransport(serial, address)
    from farm.devices.adb.transport import AdbTransport

    return AdbTransport(serial, address.port, host=address.host)
