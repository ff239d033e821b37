"""The port that leads over a real sshd to an adb server, and hostile clients of it."""

from __future__ import annotations

import getpass
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ssh_server import SshServer
from waiting import is_idle, poll, until

from farm.base.config.settings import load_config
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.hosts import reach_server

if TYPE_CHECKING:
    from conftest import Bench

SECONDS = 30.0


class Tunnel:
    """A tunnel to the bench's adb server, as farm opens it."""

    def __init__(self, server: AdbHost, pid: int) -> None:
        self.server, self.pid = server, pid

    def answers(self) -> bool:
        return "virtual-SM8650-0" in self.server.query("host:devices-l")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=SECONDS)

    def reset(self, data: bytes = b"") -> None:
        with self.connect() as connection:
            connection.sendall(data)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))


@pytest.fixture(scope="module")
def tunnel(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tunnel]:
    folder = tmp_path_factory.mktemp("tunnel")
    with Supervisor() as supervisor:
        board = SshServer(supervisor, folder / "board").start()
        (folder / "farm.toml").write_text(
            f'[[host]]\nname = "attic"\nadb = "127.0.0.1:{bench.server.port}"\n'
            f'ssh = "{getpass.getuser()}@127.0.0.1:{board.port}"\n'
            f'key_file = "{board.folder}/user_key"\nknown_hosts = "{board.known_hosts}"\n'
        )
        (host,) = load_config(folder / "farm.toml").hosts
        server = reach_server(host, supervisor)
        yield Tunnel(server, supervisor.find("tunnel to attic").pid)
        board.stop()


def _fewer_than(tunnel: Tunnel, most: int) -> bool:
    return poll(lambda: tunnel.threads <= most, SECONDS)


@pytest.mark.parametrize("data", [b"", b"000chost:ver"], ids=["at once", "within a request"])
def test_connections_that_are_reset_end_nothing(tunnel: Tunnel, data: bytes) -> None:
    for _ in range(40):
        tunnel.reset(data)
    assert tunnel.answers()


def test_connections_that_are_reset_before_they_are_accepted_end_nothing(tunnel: Tunnel) -> None:
    os.kill(tunnel.pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            tunnel.reset()
    finally:
        os.kill(tunnel.pid, signal.SIGCONT)
    assert tunnel.answers()


def test_a_reset_ends_what_the_server_would_go_on_with(tunnel: Tunnel) -> None:
    """adb's stream of devices is endless: no part of it stays after its reader has left."""
    assert tunnel.answers()
    before = tunnel.threads
    for _ in range(10):
        with tunnel.connect() as connection:
            connection.sendall(b"0012host:track-devices")
            assert connection.recv(4) == b"OKAY"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert _fewer_than(tunnel, before + 2)
    assert tunnel.answers()


def test_a_lack_of_descriptors_ends_nothing(tunnel: Tunnel) -> None:
    limits = resource.prlimit(tunnel.pid, resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir(f"/proc/{tunnel.pid}/fd"))) + 1
    resource.prlimit(tunnel.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        waiting = [tunnel.connect() for _ in range(12)]
        # An idle process has tried to accept them.
        until(lambda: is_idle(tunnel.pid), "an idle process")
    finally:
        resource.prlimit(tunnel.pid, resource.RLIMIT_NOFILE, limits)
    for connection in waiting:
        connection.close()
    assert tunnel.answers()
    assert Path(f"/proc/{tunnel.pid}").exists()
