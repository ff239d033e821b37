"""adb servers with devices: this machine's ordinary one, and servers of other machines."""

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
from typing import NamedTuple

import msgspec

from farm.base.config.devices import HostConfig, SshLogin
from farm.base.errors import InfraError
from farm.base.processes import Child, Supervisor, ending
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import ordinary_server
from farm.devices.device import LOOPBACK, AdbAddress, Device
from farm.devices.ssh.config import ssh_address

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
