"""Attached virtual devices behind an adb server that stays, and a person who starts again what died. For chaos.py."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator

from chaos_farm import HERE
from chaos_home import Home
from ssh_server import SshServer
from stub_farm import SOC

from farm.base.errors import InfraError
from farm.base.processes import Child, Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.device import AdbAddress
from farm.devices.virtual.boot import boot

_SERVER = "adb server"
_HOST = """
[[host]]
name = "attic"
ssh = "{user}@127.0.0.1:{port}"
adb = "127.0.0.1:{adb_port}"
key_file = "{folder}/user_key"
known_hosts = "{folder}/known_hosts"
"""


def has_sshd() -> bool:
    """Tell whether devices can be behind a tunnel here."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") is not None


class Lab:
    """Devices of one round. With `tunnel` they look to farm like devices of another machine."""

    def __init__(self, supervisor: Supervisor, home: Home, *, tunnel: bool) -> None:
        self._supervisor, self._home = supervisor, home
        self._server = start_adb_server(supervisor, home.folder / "adb")
        self._server_child = supervisor.find(_SERVER)
        self._others: list[Child] = []
        devices = boot(supervisor, self._server, [SOC] * home.attached, home.storage)
        addresses = {device.serial: device.address for device in devices}
        self._ports = {
            serial: int(address.attached_at.rpartition(":")[2])
            for serial, address in addresses.items()
            if isinstance(address, AdbAddress)
        }
        self._children: dict[str, Child] = {serial: supervisor.find(serial) for serial in self._ports}
        self._seen_dead: dict[str, float] = {}
        ordinary = self._server
        if tunnel:
            self._open_sshd()
            # This machine's own server has nothing.
            ordinary = start_adb_server(supervisor, home.folder / "empty")
            self._others.append(supervisor.find(_SERVER))
        self.environment = {"ANDROID_ADB_SERVER_PORT": str(ordinary.port)}

    @property
    def pids(self) -> set[int]:
        """Processes that do not end with a run."""
        return {child.pid for child in (*self._children.values(), *self._others, self._server_child)}

    @property
    def is_whole(self) -> bool:
        """Return whether all processes of the lab run."""
        alive = all(child.process.poll() is None for child in self._children.values())
        return alive and (self._server_child.process.poll() is None or self._foreign_server())

    def tend(self, pause_s: float) -> list[str]:
        """Start again the processes that have been dead for `pause_s`; return their names."""
        now, done = time.monotonic(), []
        for serial, child in self._children.items():
            if child.process.poll() is not None and now > self._seen_dead.setdefault(serial, now) + pause_s:
                del self._seen_dead[serial]
                self._children[serial] = self._boot(serial)
                done.append(serial)
        is_gone = self._server_child.process.poll() is not None and not self._foreign_server()
        if is_gone and now > self._seen_dead.setdefault(_SERVER, now) + pause_s:
            del self._seen_dead[_SERVER]
            with contextlib.suppress(InfraError):
                self._server = start_adb_server(self._supervisor, self._home.folder / "adb", port=self._server.port)
                self._server_child = self._supervisor.find(_SERVER)
                done.append(_SERVER)
        if done:
            self._connect_all()
        return done

    def _foreign_server(self) -> bool:
        """Tell whether another adb server took the port, as `adb start-server` of a farm does."""
        if self._server_child.process.poll() is None:
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server.port), timeout=1.0):
            return True
        return False

    def _boot(self, serial: str) -> Child:
        root = self._home.storage / serial
        argv = [sys.executable, "-S", "-m", "farm.devices.virtual", "--root", root, "--soc", SOC, "--serial", serial]
        environment = {"PATH": os.defpath, "PYTHONPATH": str(HERE.parents[1])}
        child = self._supervisor.spawn(
            [*argv, "--port", str(self._ports[serial])],
            name=serial,
            env=environment,
            stdout_pipe=True,
            stderr=self._home.folder / f"{serial}.log",
        )
        child.first_line(20.0)
        return child

    def _connect_all(self) -> None:
        for port in self._ports.values():
            with contextlib.suppress(InfraError):
                AdbServer(self._server.port, self._server.adb).connect("127.0.0.1", port, timeout_s=5.0)

    def _open_sshd(self) -> None:
        """Make the adb server reachable through an SSH tunnel."""
        server = SshServer(self._supervisor, self._home.folder / "ssh").start()
        self._others.append(server.child)
        values = {"port": server.port, "adb_port": self._server.port, "folder": server.folder}
        self._home.configure(_HOST.format(user=getpass.getuser(), **values))


@contextlib.contextmanager
def lab_of(home: Home, *, tunnel: bool) -> Iterator[Lab | None]:
    """Yield the attached devices of a round, None where it has none."""
    if not home.attached:
        yield None
        return
    with Supervisor() as supervisor:
        yield Lab(supervisor, home, tunnel=tunnel)
