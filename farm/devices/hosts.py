"""Hosts with devices: adb servers of this and other machines, and rented hosts with an end time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.config.devices import DeviceTables, HostConfig, HostTable, SshLogin
from farm.base.errors import ConfigError, InfraError, UsageError
from farm.base.files import replacing
from farm.base.forms import NAME
from farm.base.paths import beside
from farm.base.processes import Child, Supervisor, ending
from farm.base.reaper import read_stat
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import ordinary_server
from farm.devices.device import LOOPBACK, AdbAddress, Device
from farm.devices.ssh.config import ssh_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.base.config.settings import Config


# adb servers with devices: this machine's ordinary one, and servers of other machines.


# A slow board's key exchange, and a server that has to be started there.
_TUNNEL_SECONDS = 75.0
_MOST_AT_ONCE = 16
# An adb server that does not start is not tried again at once.
_PAUSE_SECONDS = 2.0


def reach_server(host: HostConfig, supervisor: Supervisor) -> AdbHost:
    """Return the adb server of `host`; a tunnel to it is a child of `supervisor` and ends with that.

    A second call returns the same tunnel. Raises InfraError with the reason for an unreachable server.
    """
    if host.ssh is None:
        return AdbHost(host.adb.port, host.adb.host)
    with _lock:
        tunnels = _tunnels.setdefault(supervisor, {})
        tunnel = tunnels.get(host)
    if tunnel is None or tunnel.child.process.poll() is not None:
        tunnel = _open(host, host.ssh, supervisor)
        with _lock:
            tunnels[host] = tunnel
    return AdbHost(tunnel.port, tunnel=host.name)


class _Tunnel(NamedTuple):
    child: Child
    port: int


_lock = threading.Lock()
_tunnels: weakref.WeakKeyDictionary[Supervisor, dict[HostConfig, _Tunnel]] = weakref.WeakKeyDictionary()


def revive_tunnels(supervisor: Supervisor) -> list[str]:
    """Open the tunnels of `supervisor` that have ended again, at the same ports, and return a line for each.

    Raises InfraError.
    """
    lines = []
    with _lock:
        tunnels = dict(_tunnels.get(supervisor, {}))
    for host, tunnel in tunnels.items():
        if host.ssh is not None and (code := tunnel.child.process.poll()) is not None:
            again = _open(host, host.ssh, supervisor, tunnel.port)
            with _lock:
                _tunnels[supervisor][host] = again
            lines.append(f"the tunnel to {host.name} had ended with {ending(code)} and was opened again")
    return lines


class Servers:
    """adb servers of the `devices` of a run, for as long as the run has them."""

    def __init__(self, supervisor: Supervisor, devices: Iterable[Device], warnings: Iterable[str] = ()) -> None:
        """Take the devices and the `warnings` about their servers. Tunnels are children of `supervisor`."""
        self._supervisor, self._warnings = supervisor, list(warnings)
        addresses = [one.address for one in devices if isinstance(one.address, AdbAddress)]
        self._ordinary = ordinary_server() if addresses else None
        # A server on another host, as a variable of adb names it, is not this process's to start.
        place = (self._ordinary.port, LOOPBACK) if self._ordinary is not None else None
        self._behind = [one for one in addresses if (one.port, one.host) == place]
        self._next_s = 0.0

    def revive(self) -> list[str]:
        """Start ended servers and tunnels again and return a line for each; the first call adds the warnings.

        A server that another user has started meanwhile lacks devices of `adb connect`: their recovery attaches them.
        Raises InfraError for a failing start.
        """
        warnings, self._warnings = self._warnings, []
        return [*warnings, *revive_tunnels(self._supervisor), *self._revive_ordinary()]

    def _revive_ordinary(self) -> list[str]:
        if self._ordinary is None or not self._behind or time.monotonic() < self._next_s or self._ordinary.listens():
            return []
        self._next_s = time.monotonic() + _PAUSE_SECONDS
        server = ordinary_server(start=True)
        places = [one.attached_at for one in self._behind if one.attached_at]

        def attach(place: str) -> None:
            # A device that is gone as well is for its worker to bring back.
            with contextlib.suppress(InfraError):
                server.query(f"host:connect:{place}")

        with ThreadPoolExecutor(max_workers=max(1, min(_MOST_AT_ONCE, len(places)))) as pool:
            list(pool.map(attach, places))
        return [f"the adb server on {server.place} had ended and was started again"]


def _open(host: HostConfig, login: SshLogin, supervisor: Supervisor, port: int = 0) -> _Tunnel:
    name = f"tunnel to {host.name}"
    argv: list[str | Path] = [sys.executable, "-P", "-m", "farm.devices.ssh.tunnel"]
    argv += ["--adb-host", host.adb.host, "--adb-port", str(host.adb.port), "--port", str(port)]
    argv.append(msgspec.json.encode(ssh_address(login)).decode())
    # With this environment: the agent's socket is named in it.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    child = supervisor.spawn(argv, name=name, env={**os.environ, "PYTHONPATH": path}, stdout_pipe=True)
    try:
        # The tunnel prints its port or the reason of its failure.
        ready = msgspec.json.decode(child.first_line(_TUNNEL_SECONDS))
    except msgspec.DecodeError:
        ready = {"error": child.why_silent(_TUNNEL_SECONDS)}
    if "port" not in ready:
        child.terminate()
        raise InfraError(f"no tunnel to {host.name}: {ready['error']}")
    return _Tunnel(child, ready["port"])


# Hosts with an end time: rented devices, recorded by user in the state folder and found by every scan until then.


_FOLDER = "rented-hosts"


class RentedHost(msgspec.Struct, frozen=True):
    """Record of a host with an end time."""

    host: HostTable
    until_s: float
    """End of the rented session, epoch seconds."""
    owner: tuple[int, int] | None = None
    """Process id and start of the process that the host belongs to; None for a host until its end time."""

    @property
    def is_over(self) -> bool:
        """True after the end time, and after the end of the process that the host belongs to."""
        if time.time() >= self.until_s:
            return True
        if self.owner is None:
            return False
        pid, start = self.owner
        stat = read_stat(pid)
        return stat is None or stat.start != start or stat.state in "ZX"

    def config(self) -> HostConfig:
        """Return the host as scans need it. Raises ConfigError for an invalid record."""
        tables = DeviceTables(Path("host"), lambda text: beside(Path.cwd(), text) if text else None)
        (host,) = tables.hosts([self.host])
        return msgspec.structs.replace(host, until_s=self.until_s)


def rented_hosts(config: Config) -> list[RentedHost]:
    """Return the hosts whose time is not over, by name; records of the others are removed."""
    found = []
    for path in sorted((config.state_dir / _FOLDER).glob("*.json")):
        try:
            rented = msgspec.json.decode(path.read_bytes(), type=RentedHost)
        except (OSError, msgspec.DecodeError):
            continue
        if rented.is_over:
            path.unlink(missing_ok=True)
        else:
            found.append(rented)
    return found


def find_rented(config: Config, name: str) -> RentedHost | None:
    """Return the host of that name whose time is not over; None without one."""
    return next((one for one in rented_hosts(config) if one.host.name == name), None)


def host_configs(config: Config) -> Iterator[HostConfig]:
    """Yield the hosts of farm.toml, then the rented ones."""
    yield from config.hosts
    named = {host.name for host in config.hosts}
    for rented in rented_hosts(config):
        # A name of farm.toml that was added later has priority.
        if rented.host.name not in named:
            with contextlib.suppress(ConfigError):
                yield rented.config()


def add_rented(config: Config, rented: RentedHost) -> None:
    """Record a host. Raises UsageError for a name in use, and for an unwritable state folder."""
    name = rented.host.name
    if any(host.name == name for host in config.hosts):
        raise UsageError(f"{name} is a host of farm.toml: choose another name")
    if find_rented(config, name) is not None:
        raise UsageError(f"{name} is a rented host already: remove it first ('farm devices host remove {name} --yes')")
    path = _file(config, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as file:
            file.write(msgspec.json.encode(rented))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}: make it writable for you") from None


def remove_rented(config: Config, name: str) -> bool:
    """Remove a host; return whether there was one."""
    try:
        _file(config, name).unlink()
    except FileNotFoundError:
        return False
    return True


def this_process() -> tuple[int, int] | None:
    """Return id and start of this process, the owner of a host."""
    stat = read_stat(os.getpid())
    return (os.getpid(), stat.start) if stat is not None else None


def _file(config: Config, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a host: expected letters, digits, '.', '_', '-', at most 64")
    return config.state_dir / _FOLDER / f"{name}.json"
