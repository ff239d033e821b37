"""The kinds of transports, and the way from a device to its transport."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.config.devices import TAC_MODULE, SshLogin
from farm.base.errors import ConfigError, InfraError, UnknownNameError
from farm.base.processes import ask_program
from farm.base.text import clean_text
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress, Device, DeviceAddress, LocalAddress, SshAddress
from farm.devices.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.devices.transport import Transport


# A start of Python, and a look at the serial ports.
_CHECK_SECONDS = 30.0


class TransportKind(NamedTuple):
    """Kind of transport: type of its addresses, and factory from a serial and an address."""

    address: type[DeviceAddress]
    open: Callable[[str, Any], Transport]


def _ssh(serial: str, address: SshAddress) -> Transport:
    # Imported for boards alone: paramiko takes longer than the rest of a short command.
    from farm.devices.ssh.transport import SshTransport

    return SshTransport(serial, address)


KINDS = {
    "adb": TransportKind(AdbAddress, AdbTransport),
    "ssh": TransportKind(SshAddress, _ssh),
    "local": TransportKind(LocalAddress, LocalTransport),
}
"""Kinds of transport by the tag of their address: docs/developers/recipes.md, "Adding a transport"."""


def open_transport(device: Device) -> Transport:
    """Return a transport to `device`; nothing is connected before it is used. Close it."""
    return transport_to(device.serial, device.address)


def require_named(config: Config) -> None:
    """Raise ConfigError for an unusable file or address of a host or device in farm.toml.

    Devices out of service are skipped.
    """
    file = config.file or Path("farm.toml")
    for number, host in enumerate(config.hosts):
        _require_files(file, f"host[{number}]", host.ssh)
    for number, device in enumerate(config.devices):
        if device.in_service:
            _require_files(file, f"device[{number}]", device.ssh)
            _require_address(file, f"device[{number}].address", device.address)
            _require_power(file, f"device[{number}].power", device.power)


def _require_files(file: Path, place: str, login: SshLogin | None) -> None:
    for key, field in (("key_file", "key_file"), ("known_hosts", "known_hosts"), ("ssh_config", "config")):
        name = getattr(login, field, "")
        if name and (field, name) != ("config", "none") and not Path(name).is_file():
            raise ConfigError(file, f"{place}.{key}", f"there is no file {name}: correct it, or leave it out")


def _require_power(file: Path, place: str, command: tuple[str, ...]) -> None:
    if not command:
        return
    if shutil.which(command[0]) is None:
        problem = f"there is no program {command[0]} that can be executed: correct it, or leave it out"
        raise ConfigError(file, place, problem)
    if TAC_MODULE in command[1:]:
        # A missing debug board is found now, and not when a device hangs at night.
        try:
            answer = ask_program([*command, "--check"], _CHECK_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise ConfigError(file, place, f"the debug board cannot be looked for: {error}") from None
        if answer.code:
            lines = clean_text(answer.errors, 4096, lines=True).strip().splitlines() or ["without a reason"]
            raise ConfigError(file, place, lines[-1])


def _require_address(file: Path, place: str, address: dict[str, Any]) -> None:
    if not address:
        return
    try:
        known = type(from_plain(DeviceAddress, address)).__struct_fields__
    except ConfigError as error:
        raise ConfigError(file, place, error.problem) from None
    except msgspec.ValidationError as error:
        raise ConfigError(file, place, str(error)) from None
    for name in address:
        if name not in ("type", *known):
            raise ConfigError(file, place, str(UnknownNameError("key", name, known)))


def transport_to(serial: str, address: DeviceAddress) -> Transport:
    """Return a transport to the device at `address`, named `serial` in errors. The caller closes it."""
    for kind in KINDS.values():
        if kind.address is type(address):
            return kind.open(serial, address)
    raise InfraError(f"{serial}: no kind of transport is registered for {type(address).__name__}")


def from_plain(kind: type[Any], value: Any) -> Any:
    """Return an address, or a type made of a string, from plain JSON values: a `dec_hook` for plans with devices.

    Raises ConfigError for an address of an unregistered kind.
    """
    if kind is not DeviceAddress:
        return kind(value)
    tag = value.get("type") if isinstance(value, dict) else None
    if tag not in KINDS:
        raise ConfigError("device", "address", f"there is no transport {tag!r}: known are {', '.join(KINDS)}")
    return msgspec.convert(value, KINDS[tag].address)
