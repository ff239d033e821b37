"""The kinds of transports, and the way from a device to its transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farm.devices.device import AdbAddress, DeviceAddress, LocalAddress, SshAddress
from farm.devices.stub.transport import StubAddress
from farm.errors import ConfigError

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.devices.transport import Transport

KINDS: dict[str, type[DeviceAddress]] = {
    "adb": AdbAddress,
    "ssh": SshAddress,
    "local": LocalAddress,
    "stub": StubAddress,
}
"""By the tag of its address, each kind of transport: docs/devices.md, "Adding a transport"."""


def open_transport(device: Device) -> Transport:
    """Return a transport to `device`; nothing is connected before it is used. Close it."""
    return device.address.open(device.serial)


def from_plain(kind: type[Any], value: Any) -> Any:
    """Return an address, or what is made of a string, from what JSON has: a `dec_hook` for plans with devices in them.

    Raises ConfigError for an address of a kind that is not registered.
    """
    if kind is not DeviceAddress:
        return kind(value)
    tag = value.get("type") if isinstance(value, dict) else None
    if tag not in KINDS:
        raise ConfigError("the plan", "address", f"there is no transport {tag!r}: known are {', '.join(KINDS)}")
    return msgspec.convert(value, KINDS[tag])
