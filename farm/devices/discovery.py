"""What is attached: which devices can be used, and why the others cannot."""

from __future__ import annotations

import getpass
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.devices.adb_names import VIRTUAL_PREFIX, network_address
from farm.devices.device import LOOPBACK, AdbAddress, Device, LocalAddress, Unusable
from farm.devices.identity import NAME, identify_transport, place_of
from farm.devices.text import clean_text
from farm.errors import DeviceError, InfraError, MissingToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farm.config import Config, DeviceConfig, HostConfig
    from farm.devices.adb_host import AdbHost
    from farm.devices.device import Address
    from farm.processes import Supervisor

# More are not attached to one machine; a server that lists more is not believed.
_MOST_DEVICES = 256
# Hosts are asked at the same time; most of it is waiting for their networks.
_MOST_AT_ONCE = 16

_REASONS = {
    "unauthorized": "it does not trust this machine: unlock it and accept 'Allow USB debugging'",
    "authorizing": "it is being asked whether it trusts this machine: try again",
    "connecting": "it is being connected: try again",
    "offline": "adb sees it but it does not answer: replug it, or 'adb reconnect offline'",
    "no permissions": "this user may not open its USB device: add a udev rule for it",
    "recovery": "it is in recovery mode: restart it",
    "rescue": "it is in rescue mode: restart it",
    "sideload": "it is in sideload mode: restart it",
    "bootloader": "it is in its bootloader: restart it",
}

ABSENT = "absent"
"""State of what farm.toml names and is not there."""
MISMATCH = "mismatch"
"""State of a device that is another than farm.toml expects, or the same as one found before."""
OUT = "out"
"""State of a device that farm.toml puts out of service."""


class Scan(msgspec.Struct, frozen=True):
    """What is attached, both parts sorted by serial."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...]


class _Found(NamedTuple):
    device: Device | Unusable
    adb_name: str = ""
    """What its adb server calls it: `HOST:PORT` for one that is attached by `adb connect`."""
    said: DeviceConfig | None = None
    """The entry of farm.toml that it was found by."""


def scan_all(config: Config, supervisor: Supervisor) -> Scan:
    """Ask every device of every host who it is: the ordinary adb server's, and those of farm.toml.

    Tunnels to other hosts are children of `supervisor`. What cannot be reached is an Unusable with the reason. Names,
    labels and expectations of farm.toml are filled in and kept to.
    """
    asked: list[Callable[[], list[_Found]]] = [lambda: _ordinary(config.devices)]
    asked += [lambda host=host: _beyond(host, supervisor) for host in config.hosts]  # type: ignore[misc]
    asked += [lambda one=one: _alone(one) for one in config.devices if one.ssh or one.local]  # type: ignore[misc]
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(asked))) as pool:
        found = [one for answers in pool.map(lambda ask: ask(), asked) for one in answers]
    seen: dict[str, Device] = {}
    unusable = []
    for one in found:
        device = _described(one, config.devices)
        if isinstance(device, Unusable):
            unusable.append(device)
        elif device.id not in seen:
            seen[device.id] = device
        elif seen[device.id].address != device.address:
            problem = f"says that it is {device.serial}, as {place_of(seen[device.id].address)} does: name one of them"
            unusable.append(Unusable(place_of(device.address), MISMATCH, problem, device.host))
    return _sorted(seen.values(), unusable)


def discover(port: int) -> list[Device]:
    """Return the usable devices behind the adb server on `port`, sorted. Raises InfraError without a server."""
    return list(scan(port).devices)


def scan(port: int, *, host: str = LOOPBACK, name: str = "") -> Scan:
    """Ask every device behind one adb server who it is, all at once. Raises InfraError without a server.

    `name` is what the machine is called that they hang on.
    """
    from farm.devices.adb_host import AdbHost

    found = [one.device for one in _behind(AdbHost(port, host), name)]
    return _sorted(
        [one for one in found if isinstance(one, Device)], [one for one in found if isinstance(one, Unusable)]
    )


def identify(serial: str, port: int, *, host: str = LOOPBACK, name: str = "", attached_at: str = "") -> Device:
    """Ask one device behind an adb server who it is, in one round trip: see scan, AdbAddress. Raises DeviceError."""
    from farm.devices.adb import AdbTransport

    transport = AdbTransport(serial, port, host=host)
    return identify_transport(transport, AdbAddress(port, host, attached_at), host=name)


def identify_again(device: Device) -> Device:
    """Ask what is where `device` was who it is, of whatever kind its transport is. Raises DeviceError."""
    from farm.devices.connect import open_transport

    transport = open_transport(device)
    try:
        return identify_transport(transport, device.address, host=device.host)
    finally:
        transport.close()


def _ordinary(configured: Sequence[DeviceConfig]) -> list[_Found]:
    """Return what the user's own adb server has, with what farm.toml wants attached to it."""
    from farm.devices.adb_host import AdbHost
    from farm.devices.adb_server import ordinary_server

    name = socket.gethostname()
    try:
        server = ordinary_server(start=True)
        listed = {address for _, _, address in _attached(AdbHost(server.port).query("host:devices-l"))}
    except (InfraError, MissingToolError) as error:
        return [_Found(Unusable("adb", ABSENT, clean_text(str(error)), name))]
    problems = []
    for one in configured:
        if one.connect is not None and str(one.connect) not in listed:
            try:
                server.connect(one.connect.host, one.connect.port)
            except InfraError as error:
                reason = _REASONS["unauthorized"] if "authenticate" in str(error) else clean_text(str(error))
                problems.append(_Found(Unusable(str(one.connect), ABSENT, reason, name), said=one))
    try:
        found = _behind(AdbHost(server.port), name)
    except InfraError as error:
        return [_Found(Unusable("adb", ABSENT, clean_text(str(error)), name))]
    there = {one.adb_name for one in found}
    return found + [one for one in problems if one.device.serial not in there]


def _beyond(host: HostConfig, supervisor: Supervisor) -> list[_Found]:
    """Return what another machine's adb server has."""
    from farm.devices.hosts import reach_server

    try:
        return _behind(reach_server(host, supervisor), host.name)
    except InfraError as error:
        return [_Found(Unusable(host.name, ABSENT, clean_text(str(error), 400), host.name))]


def _alone(said: DeviceConfig) -> list[_Found]:
    """Return the device that is a machine by itself."""
    from farm.devices.connect import transport_to
    from farm.devices.hosts import ssh_address

    address: Address = LocalAddress(said.storage or f"/var/tmp/farm-{getpass.getuser()}")  # noqa: S108 - looked at
    host = socket.gethostname()
    if said.ssh is not None:
        address, host = ssh_address(said.ssh, said.storage), said.ssh.host
    place = place_of(address)
    transport = transport_to(place, address)
    try:
        return [_Found(identify_transport(transport, address, host=host), said=said)]
    except InfraError as error:
        return [_Found(Unusable(place, ABSENT, _why(error, place), host), said=said)]
    finally:
        transport.close()


def _behind(server: AdbHost, name: str) -> list[_Found]:
    listed = _attached(server.query("host:devices-l"))
    found = [
        _Found(Unusable(serial, state, _REASONS.get(state, f"adb says {state!r}: replug it"), name), adb_name)
        for serial, state, adb_name in listed
        if state != "device"
    ]
    ready = [(serial, adb_name) for serial, state, adb_name in listed if state == "device"]

    def ask(one: tuple[str, str]) -> _Found:
        serial, adb_name = one
        try:
            attached_at = network_address(adb_name)
            device = identify(serial, server.port, host=server.host, name=name, attached_at=attached_at)
            return _Found(device, adb_name)
        except DeviceError as error:
            return _Found(Unusable(serial, "device", _why(error, serial), name), adb_name)

    with ThreadPoolExecutor(max_workers=max(1, min(_MOST_AT_ONCE, len(ready)))) as pool:
        return found + list(pool.map(ask, ready))


def _described(found: _Found, configured: Sequence[DeviceConfig]) -> Device | Unusable:
    """Return what was found as farm.toml describes it: named, or refused."""
    device = found.device
    said = found.said
    if said is None:
        keys = {device.serial, found.adb_name}
        said = next((one for one in configured if {one.serial, str(one.connect or "")} & keys - {""}), None)
    if said is None:
        return device
    if not said.in_service:
        reason = "out of service in farm.toml" + (f": {said.note}" if said.note else "")
        return Unusable(device.serial, OUT, reason, device.host)
    if isinstance(device, Unusable):
        return device
    if said.soc and said.soc.upper() != device.soc:
        reason = f"is a {device.soc}, and farm.toml expects a {said.soc.upper()}"
        return Unusable(device.serial, MISMATCH, reason, device.host)
    return msgspec.structs.replace(device, name=said.name, labels=said.labels)


def _attached(listing: str) -> list[tuple[str, str, str]]:
    """Return serial, state and adb's name of every line of `host:devices-l`; a virtual one's serial is its product."""
    attached = []
    for line in listing.splitlines()[:_MOST_DEVICES]:
        serial, _, rest = line.partition(" ")
        adb_name = serial
        rest = rest.strip()
        # The one state of two words, followed by an explanation.
        state = "no permissions" if rest.startswith("no permissions") else clean_text(rest.split(" ")[0])
        product = next((word.removeprefix("product:") for word in rest.split() if word.startswith("product:")), "")
        if product.startswith(VIRTUAL_PREFIX) and NAME.fullmatch(product):
            serial = product
        attached.append((clean_text(serial), state, clean_text(adb_name)))
    return attached


def _why(error: InfraError, place: str) -> str:
    return clean_text(str(error).removeprefix(f"{place}: "), 400)


def _sorted(devices: Iterable[Device], unusable: Iterable[Unusable]) -> Scan:
    return Scan(tuple(sorted(devices, key=lambda one: one.serial)), tuple(sorted(unusable, key=lambda one: one.serial)))
