"""The adb servers that devices hang behind: this machine's ordinary one, and those of other machines."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.devices.adb.host import AdbHost
from farm.devices.ssh.config import ssh_address
from farm.errors import InfraError
from farm.system.processes import ending

if TYPE_CHECKING:
    from farm.config.devices import HostConfig, SshLogin
    from farm.system.processes import Child, Supervisor

# A slow board's key exchange, and a server that has to be started there.
_TUNNEL_SECONDS = 75.0


def reach_server(host: HostConfig, supervisor: Supervisor) -> AdbHost:
    """Return the adb server of `host`; a tunnel to it is a child of `supervisor` and ends with that.

    Asked again, it is the tunnel of before. Raises InfraError that says why the server cannot be reached.
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
    return AdbHost(tunnel.port)


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


def _open(host: HostConfig, login: SshLogin, supervisor: Supervisor, port: int = 0) -> _Tunnel:
    name = f"tunnel to {host.name}"
    argv: list[str | Path] = [sys.executable, "-m", "farm.devices.ssh.tunnel"]
    argv += ["--adb-host", host.adb.host, "--adb-port", str(host.adb.port), "--port", str(port)]
    argv.append(msgspec.json.encode(ssh_address(login)).decode())
    # With this environment: the agent's socket is named in it.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    child = supervisor.spawn(argv, name=name, env={**os.environ, "PYTHONPATH": path}, stdout_pipe=True)
    try:
        # What the tunnel prints: its port, or why there is none.
        ready = msgspec.json.decode(child.first_line(_TUNNEL_SECONDS))
    except msgspec.DecodeError:
        ready = {"error": child.why_silent(_TUNNEL_SECONDS)}
    if "port" not in ready:
        child.terminate()
        raise InfraError(f"no tunnel to {host.name}: {ready['error']}")
    return _Tunnel(child, ready["port"])
