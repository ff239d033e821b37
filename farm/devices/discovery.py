"""Discovery of attached devices: usable ones, and unusable ones with their reasons."""

from __future__ import annotations

import getpass
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from farm.base.errors import ConfigError, DeviceError, InfraError
from farm.base.text import clean_text
from farm.devices.adb.host import AdbHost, Attached, is_relayed
from farm.devices.adb.protocol import SERIAL_VARIABLE, adb_target, named_device
from farm.devices.adb.server import AdbServer, ordinary_server, outdated
from farm.devices.connect import from_plain
from farm.devices.device import LOOPBACK, AdbAddress, Device, DeviceAddress, LocalAddress, PowerCommand, Unusable
from farm.devices.facts import identify
from farm.devices.hosts import host_configs, reach_server
from farm.devices.ssh.config import ssh_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farm.base.config.settings import Config, DeviceConfig, HostConfig
    from farm.base.processes import Supervisor

# Hosts and devices that are queried at the same time; most of the time is waiting for their networks.
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
"""State of a device that farm.toml names and that is absent."""
MISMATCH = "mismatch"
"""State of a device with another SoC than farm.toml expects, or with the serial of another found device."""
OUT = "out"
"""State of a device that farm.toml puts out of service."""
LEFT_OUT = "left out"
"""State of each device that ANDROID_SERIAL does not name, if it names a device."""


class PinnedDevice(msgspec.Struct, frozen=True):
    """Device that ANDROID_SERIAL names."""

    name: str
    """Value of the variable."""
    ids: frozenset[str] = frozenset()
    """Ids of the devices: none for an absent or unusable device, several for a serial of several hosts."""
    problem: str = ""
    """Reason for a name without a device, in adb's words."""

    @property
    def refusal(self) -> str:
        """Reason for the end of a command without a device, and the next step."""
        named = f"{SERIAL_VARIABLE} names {self.name}"
        return f"{named}, and {self.problem}: attach it, unset {SERIAL_VARIABLE}, or name another with --device"


class Scan(msgspec.Struct, frozen=True):
    """Attached devices, both parts sorted by serial."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...]
    warnings: tuple[str, ...] = ()
    """Problems of an adb server whose devices are usable nevertheless."""
    pinned: PinnedDevice | None = None
    """Device that ANDROID_SERIAL names; None where it names none."""

    @property
    def narrowed(self) -> Scan:
        """This scan with the device that ANDROID_SERIAL names alone; the others cannot be used."""
        if self.pinned is None:
            return self
        ids, reason = self.pinned.ids, f"{SERIAL_VARIABLE} names {self.pinned.name}"
        found = [one if one.id in ids else Unusable(one.serial, LEFT_OUT, reason, one.host) for one in self.devices]
        return replace(_sorted([*found, *self.unusable], self.warnings), pinned=self.pinned)


class _Found(NamedTuple):
    device: Device | Unusable
    adb_name: str = ""
    """Name on its adb server: `HOST:PORT` for a device of `adb connect`."""
    entry: DeviceConfig | None = None
    """The entry of farm.toml that it was found by."""


def scan_all(config: Config, supervisor: Supervisor, *, rented: bool = True) -> Scan:
    """Identify every device of every host: of the ordinary adb server, of farm.toml, and of `rented` hosts.

    Tunnels to other hosts are children of `supervisor`. An unreachable device is an Unusable with the reason. Names and
    labels of farm.toml are filled in, and its expectations are checked.
    """
    warnings: list[str] = []
    hosts = list(host_configs(config)) if rented else list(config.hosts)
    asked: list[Callable[[], list[_Found]]] = [lambda: _ordinary(config.devices, warnings)]
    asked += [lambda host=host: _beyond(host, config.devices, supervisor, warnings) for host in hosts]  # type: ignore[misc]
    asked += [lambda one=one: _alone(one) for one in config.devices if one.ssh or one.local or one.address]  # type: ignore[misc]
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(asked))) as pool:
        found = [one for answers in pool.map(lambda ask: ask(), asked) for one in answers]
    seen: dict[str, Device] = {}
    unusable: list[Unusable] = []
    for one in found:
        device = _described(one, config.devices)
        if isinstance(device, Unusable):
            unusable.append(device)
        elif device.id not in seen:
            seen[device.id] = device
        elif (both := _joined(seen[device.id], device)) is not None:
            seen[device.id] = both
        elif seen[device.id].address != device.address:
            unusable.append(_twin(device, seen[device.id]))
    scanned = _sorted([*seen.values(), *unusable], warnings)
    return replace(scanned, pinned=_pinned(scanned, named_device(os.environ)))


def _pinned(scanned: Scan, name: str) -> PinnedDevice | None:
    """Return the device that adb finds by `name`, or else the device with that serial; None without a name."""
    if not name:
        return None
    shown = clean_text(name)
    try:
        server = ordinary_server()
        found = clean_text(server.query(f"host-serial:{name}:get-serialno"))
    except InfraError as error:
        # A device of another host, or one without adb.
        serials = {name, name.removeprefix("product:")}
        ids = frozenset(one.id for one in scanned.devices if one.serial in serials)
        return PinnedDevice(shown, ids, "" if ids else clean_text(str(error).rpartition("get-serialno: ")[2]))
    for one in scanned.devices:
        address = one.address
        behind = (address, *address.also) if isinstance(address, AdbAddress) else ()
        here = (there for there in behind if (there.host, there.port) == (server.host, server.port))
        if any(found in (there.name, there.attached_at) for there in here) or (one.serial == found and behind):
            return PinnedDevice(shown, frozenset({one.id}))
    if is_relayed(server.query("host:devices-l"), found):
        return PinnedDevice(shown, problem="'farm devices connect' has the device leased under that name")
    reasons = (f"it is {one.state}: {one.reason}" for one in scanned.unusable if one.serial == found)
    return PinnedDevice(shown, problem=next(reasons, "it cannot be used: 'farm devices' shows why"))


def scan(port: int, host: str = LOOPBACK) -> Scan:
    """Identify all devices of an adb server at the same time. Raises InfraError without a server."""
    return _sorted([one.device for one in _behind(AdbHost(port, host), "", (), [])])


def _ordinary(configured: Sequence[DeviceConfig], warnings: list[str]) -> list[_Found]:
    """Return the devices of the user's own adb server, including devices that farm.toml attaches to the server."""
    name = socket.gethostname()
    try:
        server = ordinary_server(start=True)
        problems = _connect(server, server.attached(), configured, name)
        found = _behind(server, name, configured, warnings)
    except InfraError as error:
        return [_Found(Unusable("adb", ABSENT, clean_text(str(error)), name))]
    there = {one.adb_name for one in found}
    return found + [one for one in problems if one.device.serial not in there]


def _connect(
    server: AdbServer, listed: Iterable[Attached], configured: Sequence[DeviceConfig], name: str
) -> list[_Found]:
    """Attach the devices that farm.toml connects and `listed` lacks, at the same time; return the failures."""
    known = {one.adb_name for one in listed}

    def connect(one: DeviceConfig) -> list[_Found]:
        place = str(one.connect)
        if one.connect is None or place in known:
            return []
        if not one.in_service:
            return [_Found(_out(place, name, one), entry=one)]
        try:
            server.connect(one.connect.host, one.connect.port)
        except InfraError as error:
            reason = _REASONS["unauthorized"] if "authenticate" in str(error) else clean_text(str(error))
            return [_Found(Unusable(place, ABSENT, reason, name), entry=one)]
        return []

    with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
        return [one for problems in pool.map(connect, configured) for one in problems]


def _beyond(
    host: HostConfig, configured: Sequence[DeviceConfig], supervisor: Supervisor, warnings: list[str]
) -> list[_Found]:
    """Return the devices of another machine's adb server."""
    try:
        found = _behind(reach_server(host, supervisor), host.name, configured, warnings)
        return [one._replace(device=_until(one.device, host.until_s)) for one in found]
    except InfraError as error:
        return [_Found(Unusable(host.name, ABSENT, clean_text(str(error), 400), host.name))]


def _until(device: Device | Unusable, until_s: float) -> Device | Unusable:
    """Return a device with the end of its rented session."""
    return replace(device, until_s=until_s) if isinstance(device, Device) and until_s else device


def _alone(entry: DeviceConfig) -> list[_Found]:
    """Return a device without an adb server: reached by SSH, by an address of a plugin, or this machine."""
    address: DeviceAddress = LocalAddress(entry.storage or f"/var/tmp/farm-{getpass.getuser()}")  # noqa: S108 - looked at
    host = socket.gethostname()
    if entry.ssh is not None:
        host = entry.ssh.host
        try:
            address = ssh_address(entry.ssh, entry.storage)
        except InfraError as error:
            return [_Found(Unusable(host, ABSENT, clean_text(str(error), 400), host), entry=entry)]
    elif entry.address:
        try:
            address = from_plain(DeviceAddress, entry.address)
        except (ConfigError, msgspec.ValidationError) as error:
            name = str(entry.address.get("type"))
            return [_Found(Unusable(name, ABSENT, f"its address in farm.toml: {error}", host), entry=entry)]
    place = address.place
    if not entry.in_service:
        return [_Found(_out(place, host, entry), entry=entry)]
    try:
        return [_Found(identify(place, address, host=host), entry=entry)]
    except InfraError as error:
        return [_Found(Unusable(place, ABSENT, _why(error, place), host), entry=entry)]


def _behind(server: AdbHost, name: str, configured: Sequence[DeviceConfig], warnings: list[str]) -> list[_Found]:
    """Return the devices of an adb server; devices that `configured` puts out of service are not asked.

    Problems of the server itself are added to `warnings`.
    """
    if problem := outdated(server):
        warnings.append(f"{name}: {problem}" if name else problem)

    def ask(one: Attached) -> _Found:
        entry = _entry(configured, one.serial, one.adb_name)
        if entry is not None and not entry.in_service:
            return _Found(_out(one.serial, name, entry), one.adb_name)
        if one.state != "device":
            reason = _REASONS.get(one.state, f"its state in adb is {one.state!r}: replug it")
            return _Found(Unusable(one.serial, one.state, reason, name), one.adb_name)
        try:
            name_there = "" if one.target == adb_target(one.serial) and one.serial != one.adb_name else one.adb_name
            address = AdbAddress(server.port, server.host, one.network_address, name_there, server.tunnel)
            device = identify(one.serial, address, host=name)
        except DeviceError as error:
            return _Found(Unusable(one.serial, "device", _why(error, one.serial), name), one.adb_name)
        return _Found(device, one.adb_name)

    with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
        return list(pool.map(ask, server.attached()))


def _described(found: _Found, configured: Sequence[DeviceConfig]) -> Device | Unusable:
    """Return the found device with its settings of farm.toml, or its refusal."""
    device = found.device
    entry = found.entry or _entry(configured, device.serial, found.adb_name)
    if entry is None or isinstance(device, Unusable):
        return device
    if not entry.in_service:
        # The device was identified under another address, which farm.toml does not name.
        return _out(device.serial, device.host, entry)
    if entry.soc and entry.soc != device.soc:
        reason = f"is a {device.soc}, and farm.toml expects a {entry.soc}"
        return Unusable(device.serial, MISMATCH, reason, device.host)
    power = PowerCommand(entry.power, entry.power_timeout_s) if entry.power else None
    return replace(device, name=entry.name, labels=entry.labels, power=power)


def _entry(configured: Sequence[DeviceConfig], *keys: str) -> DeviceConfig | None:
    """Return the entry of farm.toml for a serial or a name of adb."""
    return next((one for one in configured if {one.serial, str(one.connect or "")} & {*keys} - {""}), None)


def _out(serial: str, host: str, entry: DeviceConfig) -> Unusable:
    reason = "out of service in farm.toml" + (f": {entry.note}" if entry.note else "")
    return Unusable(serial, OUT, reason, host)


def _joined(first: Device, second: Device) -> Device | None:
    """Return one device with both addresses, a cable first, where both are of the same start of one system. Pure."""
    one, other = first.address, second.address
    if one == other or not isinstance(one, AdbAddress) or not isinstance(other, AdbAddress):
        return None
    if not first.boot_id or first.boot_id != second.boot_id:
        return None
    addresses = [replace(address, also=()) for address in (one, *one.also, other, *other.also)]
    best, *others = sorted(dict.fromkeys(addresses), key=lambda address: not address.is_cable)
    main = first if first.name or not second.name else second
    labels = tuple(dict.fromkeys((*first.labels, *second.labels)))
    host = first.host if best == addresses[0] else second.host
    power = first.power or second.power
    return replace(main, address=replace(best, also=tuple(others)), labels=labels, host=host, power=power)


def _twin(device: Device, first: Device) -> Unusable:
    """Return the refusal of a device with the serial of an earlier one."""
    problem = (
        f"has the serial {device.serial}, like {first.address.place}: remove one of the two from farm.toml if they are "
        "the same device; otherwise give one of them a serial of its own"
    )
    return Unusable(device.address.place, MISMATCH, problem, device.host)


def _why(error: InfraError, place: str) -> str:
    return clean_text(str(error).removeprefix(f"{place}: "), 400)


def _sorted(found: Iterable[Device | Unusable], warnings: Iterable[str] = ()) -> Scan:
    ordered = sorted(found, key=lambda one: one.serial)
    devices = tuple(one for one in ordered if isinstance(one, Device))
    return Scan(devices, tuple(one for one in ordered if isinstance(one, Unusable)), tuple(sorted(warnings)))
