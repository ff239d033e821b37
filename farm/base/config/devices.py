"""Tables of farm.toml for hosts, devices, health and leases, as plain values."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec

from farm.base.errors import ConfigError, UnknownNameError
from farm.base.forms import NAME
from farm.base.socs import SOC_NAME, find_soc, is_soc, load_socs

ADB_PORT = 5037
SSH_PORT = 22

POWER_SERIAL = "{serial}"
"""Stands in a power command for the device's serial."""

TAC_MODULE = "farm.devices.tac_power"
"""Program of the power command for a Qualcomm debug board."""

_TAC = re.compile(r"tac:[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}")
# Not `${NAME}`, which is for a shell that the command starts.
_PLACEHOLDER = re.compile(r"(?<!\$)\{\w+\}")
_SERIAL = re.compile(r"[\x21-\x7e]{1,128}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:.]{2,45}")

_ENDPOINT = "HOST:PORT"
_LOGIN = "host, user@host or user@host:port"


def is_ssh_user(name: str) -> bool:
    """Return whether an account may be called so."""
    return bool(_USER.fullmatch(name))


def is_ssh_host(name: str) -> bool:
    """Return whether this can be the name or the address of a machine, and never an option."""
    return bool(_HOST.fullmatch(name))


def split_address(text: str) -> tuple[str, str | None]:
    """Return host and port, None without a port; the host is empty for another form and for IPv6 without brackets."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        return (host, rest[1:] if rest else None) if closed and rest[:1] in ("", ":") else ("", None)
    host, colon, port = text.partition(":")
    return ("", None) if ":" in port else (host, port if colon else None)


class Endpoint(msgspec.Struct, frozen=True):
    """Address of a listening server."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as farm.toml has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SshLogin(msgspec.Struct, frozen=True):
    """An account on a machine, and how to get in."""

    user: str
    """User name; empty for the one in ~/.ssh/config, else this user."""
    host: str
    """A name or address, or what ~/.ssh/config calls it."""
    port: int = 0
    """Port; 0 for the one in ~/.ssh/config, else 22."""
    key_file: str = ""
    """Private key; empty for keys of ~/.ssh/config, of the agent and the user's default ones."""
    known_hosts: str = ""
    """File of host keys; empty for the one in ~/.ssh/config, else ~/.ssh/known_hosts."""
    config: str = ""
    """Configuration file of ssh; empty for ~/.ssh/config, if it exists; `none` for no file."""


class HostConfig(msgspec.Struct, frozen=True):
    """A machine that devices hang on."""

    name: str
    adb: Endpoint
    """adb server of the device; with `ssh`, the address on that machine."""
    ssh: SshLogin | None = None
    """The adb server is reached through it, None when directly."""
    until_s: float = 0.0
    """End of the rented session of its devices, epoch seconds; 0 for a host without an end."""


class _DeviceFields(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of `[[device]]` that are used as they are written, but for the spelling of `storage` and `soc`."""

    serial: str = ""
    """Serial of an attached device."""
    local: bool = False
    """True if this machine is the device."""
    address: dict[str, Any] = {}
    """Address for another kind of transport, with its `type` (`farm.devices.connect`)."""
    storage: str = ""
    """Folder of farm on the device, for `ssh` and `local`; default: `/var/tmp/farm-USER`."""
    name: str = ""
    """Name of the device."""
    labels: tuple[str, ...] = ()
    """Labels for `--label`."""
    in_service: bool = True
    """True if runs use the device."""
    note: str = ""
    """Note that every refusal of the device shows."""
    soc: str = ""
    """Expected SoC; a device with another SoC is refused."""
    power_timeout_s: float = 60.0
    """Longest time of the command `power`, 1 to 600."""


class DeviceConfig(_DeviceFields, frozen=True, kw_only=True):
    """Device in farm.toml, by exactly one field: `serial`, `ssh`, `connect`, `local` or `address`."""

    ssh: SshLogin | None = None
    connect: Endpoint | None = None
    """An adb daemon on the network, for the ordinary adb server to attach."""
    power: tuple[str, ...] = ()
    """Command that cuts its power and gives it back; empty for none."""


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits for measurements on a device, and the longest waits of a run, in seconds."""

    max_temperature_c: float = 45.0
    """Highest temperature at which a job begins."""
    min_battery_percent: int = 20
    """Lowest charge at which a job begins."""
    gate_wait_s: float = 300.0
    """Longest wait for a device until it is fit."""
    disk_wait_s: float = 60.0
    """Longest wait for room on this machine's disk."""
    store_wait_s: float = 300.0
    """Longest wait for a store that does not answer."""


class LeaseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lifetimes of leases, of processes and of agents."""

    ttl_s: float = 30.0
    """Lifetime of a lease, and of an agent, without a heartbeat."""
    heartbeat_s: float = 3.0
    """Interval between two heartbeats, at most a third of `ttl_s`."""


class HostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[host]]`."""

    name: str
    """Name of the host."""
    adb: str | None = None
    """Address of its adb server, `HOST:PORT`; with `ssh` as that machine reaches it."""
    ssh: str | None = None
    """Login for a tunnel to its adb server: host, user@host, user@host:port or a Host of ~/.ssh/config."""
    key_file: str = ""
    """Private key; default: as ~/.ssh/config has it, then the agent's keys and the usual files."""
    known_hosts: str = ""
    """File of host keys; default: as ~/.ssh/config has it, else ~/.ssh/known_hosts."""
    ssh_config: str = ""
    """File in place of ~/.ssh/config; `none` for none."""


class DeviceTable(_DeviceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[device]]`."""

    ssh: str | None = None
    """Login of a Linux device with an SSH server."""
    connect: str | None = None
    """Address of an adb daemon on the network, `HOST:PORT`."""
    key_file: str = ""
    """As for `[[host]]`."""
    known_hosts: str = ""
    """As for `[[host]]`."""
    ssh_config: str = ""
    """As for `[[host]]`."""
    power: tuple[str, ...] | str = ()
    """Command that switches the power off and on again; `{serial}` stands for the device. Or `tac:SERIAL` of a Qualcomm
    debug board."""


class SocTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[soc.NAME]`: an SoC that devices report and no profile has."""

    like: str
    """Profile for an SoC name reported by devices, from the list of `farm devices socs`."""


class DeviceTables:
    """Turns tables of the file `path` into values. Everything raises ConfigError, naming file and key."""

    def __init__(self, path: Path, beside: Callable[[str], PurePath | None]) -> None:
        """`beside` makes a path of the file absolute, None for an empty one."""
        self._path, self._beside = path, beside

    def hosts(self, tables: Sequence[HostTable]) -> tuple[HostConfig, ...]:
        """Return the hosts, whose names all differ."""
        names: set[str] = set()
        return tuple(self._host(table, f"host[{number}]", names) for number, table in enumerate(tables))

    def devices(self, tables: Sequence[DeviceTable]) -> tuple[DeviceConfig, ...]:
        """Return the devices, each named at most once, and none as another is called by itself."""
        names: set[str] = set()
        places: set[object] = set()
        serials = {table.serial: number for number, table in enumerate(tables) if table.serial}
        found = []
        for number, table in enumerate(tables):
            key = f"device[{number}]"
            device = self._device(table, key, names)
            # adb calls a device that it is connected to by its address: the same may be named in two ways.
            by_adb = device.serial or (device.connect and str(device.connect))
            place = by_adb or device.local or (device.ssh and (device.ssh.host, device.ssh.port))
            place = place or str(device.address)
            self._expect(place not in places, key, "is the same device as one before")
            others = serials.get(device.name, number) != number
            self._expect(not others, f"{key}.name", f"{device.name!r} is another one's serial: choose another name")
            places.add(place)
            found.append(device)
        return tuple(found)

    def socs(self, tables: Mapping[str, SocTable]) -> dict[str, str]:
        """Return profiles by the names that devices report."""
        found: dict[str, str] = {}
        for name, table in tables.items():
            key, reported = f"soc.{name}", name.upper()
            self._expect(SOC_NAME.fullmatch(reported), key, "expected letters, digits and '_', as devices report it")
            own = next((soc.name for soc in load_socs().values() if reported in (soc.name, *soc.also)), "")
            self._expect(not own, key, f"has a profile, {own}: leave it out")
            self._expect(reported not in found, key, f"{reported} is the name of one before")
            if table.like.upper() not in load_socs():
                raise ConfigError(self._path, f"{key}.like", str(UnknownNameError("profile", table.like, load_socs())))
            found[reported] = table.like.upper()
        return found

    def health(self, health: HealthConfig) -> HealthConfig:
        """Return what can be."""
        most = {"max_temperature_c": 120, "min_battery_percent": 100}
        for name, value in msgspec.structs.asdict(health).items():
            self._within(f"health.{name}", value, 0, most.get(name, 86_400))
        return health

    def leases(self, leases: LeaseConfig) -> LeaseConfig:
        """Return what can be."""
        self._within("leases.ttl_s", leases.ttl_s, 2, 3600)
        # Two heartbeats in a row may be late or fail.
        self._within("leases.heartbeat_s", leases.heartbeat_s, 0.2, leases.ttl_s / 3)
        return leases

    def _host(self, table: HostTable, key: str, names: set[str]) -> HostConfig:
        self._name(f"{key}.name", table.name, names)
        named = table.adb is not None or table.ssh is not None
        self._expect(named, key, f"has neither adb = {_ENDPOINT!r} nor ssh = {_LOGIN!r}")
        adb = Endpoint("127.0.0.1", ADB_PORT) if table.adb is None else self._endpoint(f"{key}.adb", table.adb)
        return HostConfig(table.name, adb, self._login(key, table))

    def _device(self, table: DeviceTable, key: str, names: set[str]) -> DeviceConfig:
        ways = [name for name in ("serial", "ssh", "connect", "local", "address") if getattr(table, name)]
        ambiguity = f"has {' and '.join(ways)}" if ways else "does not name a device"
        expected = "expected one of serial, ssh, connect, address and local = true"
        self._expect(len(ways) == 1, key, f"{ambiguity}, {expected}")
        (way,) = ways
        if table.serial:
            self._expect(_SERIAL.fullmatch(table.serial), f"{key}.serial", "expected a serial without blanks")
        if table.name:
            self._name(f"{key}.name", table.name, names)
            problem = f"{table.name!r} is an SoC, which devices are asked for by as well"
            self._expect(not is_soc(table.name), f"{key}.name", problem)
        for label in table.labels:
            self._expect(NAME.fullmatch(label), f"{key}.labels", f"{label!r}: expected letters, digits, '.', '_', '-'")
        if table.storage:
            self._expect(way in ("ssh", "local"), f"{key}.storage", "adb has a folder of its own: leave it out")
            absolute = table.storage.startswith("/") and table.storage.strip("/") != ""
            usable = absolute and table.storage.isprintable() and ".." not in table.storage.split("/")
            self._expect(usable, f"{key}.storage", f"{table.storage!r}: expected an absolute path without '..'")
        self._expect(table.note.isprintable(), f"{key}.note", f"{table.note!r}: expected one line of plain text")
        as_written: dict[str, Any] = {name: getattr(table, name) for name in _DeviceFields.__struct_fields__}
        soc = self._soc(f"{key}.soc", table.soc)
        return DeviceConfig(
            ssh=self._login(key, table),
            connect=self._endpoint(f"{key}.connect", table.connect) if table.connect else None,
            power=self._power(key, table),
            **{**as_written, "storage": table.storage.rstrip("/"), "soc": soc},
        )

    def _power(self, key: str, table: DeviceTable) -> tuple[str, ...]:
        """Return a command with the path of its program made absolute; a name without a '/' is looked for in $PATH."""
        if not table.power:
            return ()
        self._expect(not table.local, f"{key}.power", "this machine cannot cut its own power: leave it out")
        self._within(f"{key}.power_timeout_s", table.power_timeout_s, 1, 600)
        if isinstance(table.power, str):
            board = _TAC.fullmatch(table.power)
            expected = '"tac:SERIAL" of a debug board, or a list with a program and its arguments'
            self._expect(board, f"{key}.power", f"{table.power!r}: expected {expected}")
            return (sys.executable, "-P", "-m", TAC_MODULE, table.power.removeprefix("tac:"))
        fine = all(word and "\0" not in word for word in table.power)
        self._expect(fine, f"{key}.power", "expected a program and its arguments, none of them empty")
        for name in (name for word in table.power for name in _PLACEHOLDER.findall(word)):
            if name != POWER_SERIAL:
                problem = UnknownNameError("placeholder", name, [POWER_SERIAL])
                raise ConfigError(self._path, f"{key}.power", str(problem))
        program, *arguments = table.power
        return (str(self._beside(program)) if "/" in program else program, *arguments)

    def _soc(self, key: str, name: str) -> str:
        """Return an SoC as its profile is called, nothing for nothing."""
        try:
            return find_soc(name).name if name else ""
        except UnknownNameError as error:
            raise ConfigError(self._path, key, str(error)) from None

    def _login(self, key: str, table: HostTable | DeviceTable) -> SshLogin | None:
        if not table.ssh:
            for name in ("key_file", "known_hosts", "ssh_config"):
                self._expect(not getattr(table, name), f"{key}.{name}", "is for ssh: leave it out")
            return None
        user, _, rest = table.ssh.rpartition("@")
        problem = f"{table.ssh!r}: expected {_LOGIN}"
        # An empty user is invalid: `@host`.
        self._expect(is_ssh_user(user) if "@" in table.ssh else True, f"{key}.ssh", problem)
        host, port = self._split(rest)
        self._expect(is_ssh_host(host), f"{key}.ssh", problem)
        key_file, known_hosts = (str(self._beside(name) or "") for name in (table.key_file, table.known_hosts))
        config = table.ssh_config if table.ssh_config == "none" else str(self._beside(table.ssh_config) or "")
        return SshLogin(user, host, port or 0, key_file, known_hosts, config)

    def _endpoint(self, key: str, text: str) -> Endpoint:
        host, port = self._split(text)
        self._expect(host and _HOST.fullmatch(host) and port, key, f"{text!r}: expected {_ENDPOINT}")
        return Endpoint(host, port or 0)

    @staticmethod
    def _split(address: str) -> tuple[str, int | None]:
        """Return host and port, None without one; no host when the port is none."""
        host, port = split_address(address)
        if port is None:
            return host, None
        good = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
        return (host, int(port)) if good else ("", None)

    def _name(self, key: str, name: str, names: set[str]) -> None:
        self._expect(NAME.fullmatch(name), key, f"{name!r}: expected letters, digits, '.', '_', '-', at most 64")
        self._expect(name not in names, key, f"{name!r} is the name of one before")
        names.add(name)

    def _within(self, key: str, value: float, least: float, most: float) -> None:
        self._expect(least <= value <= most, key, f"is {value:g}, expected {least:g} to {most:g}")

    def _expect(self, good: object, key: str, problem: str) -> None:
        if not good:
            raise ConfigError(self._path, key, problem)
