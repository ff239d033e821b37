"""The user's own adb server, as `adb start-server` starts it: it ends, others start it, it is of any version."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ordinary_server import kill_server, ordinary_adb_server

from farm.base.errors import InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server, outdated, suitable_adb
from farm.devices.adb.transport import AdbTransport
from farm.devices.connect import open_transport
from farm.devices.hosts import Servers
from farm.devices.virtual.boot import boot


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AdbServer]:
    with ordinary_adb_server(tmp_path) as server:
        yield server


def test_one_that_was_killed_is_started_again_with_what_was_attached_to_it(server: AdbServer, tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        kept = Servers(supervisor, [device])
        assert kept.revive() == []
        kill_server(server.port)
        assert not server.listens()
        assert kept.revive() == [f"the adb server on port {server.port} had ended and was started again"]
        with contextlib.closing(open_transport(device)) as transport:
            server.wait_for(AdbHost(server.port).network_address(device.serial))
            assert transport.run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
        assert kept.revive() == []


def test_two_that_start_it_at_the_same_moment_get_the_same(server: AdbServer) -> None:
    kill_server(server.port)
    with ThreadPoolExecutor(4) as pool:
        started = list(pool.map(lambda _: ordinary_server(start=True), range(4)))
    assert {one.version() for one in started} == {server.version()}


def test_it_stays_when_whatever_started_it_was_started_by_a_farm_that_ends(server: AdbServer) -> None:
    kill_server(server.port)
    script = "from farm.devices.adb import server; server.ordinary_server(start=True); print('up', flush=True)"
    with Supervisor() as supervisor:
        child = supervisor.spawn([sys.executable, "-c", script], name="farm", env=dict(os.environ), stdout_pipe=True)
        assert child.first_line(60) == b"up\n"
    assert server.answers()


class OldServerStub:
    """Stub of a server of a version that no package has: a real server that reports this version."""

    def __init__(self, server: AdbServer, version: int) -> None:
        self._server, self._version = server, b"%04x" % version
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.killed = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._carry, args=(self._listener.accept()[0],), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            head = near.recv(4, socket.MSG_WAITALL)
            request = near.recv(int(head, 16), socket.MSG_WAITALL)
            if request == b"host:version":
                near.sendall(b"OKAY0004" + self._version)
                return
            self.killed = self.killed or request == b"host:kill"
            with socket.create_connection(("127.0.0.1", self._server.port)) as far:
                far.sendall(head + request)
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()

    def close(self) -> None:
        self._listener.close()


def _copy(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@pytest.fixture
def old_server_stub(server: AdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OldServerStub]:
    """Old server; the only adb on PATH is the test's program in the folder `bin`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    stub = OldServerStub(server, 40)
    yield stub
    stub.close()


def test_no_client_of_another_version_is_let_near_a_server(old_server_stub: OldServerStub) -> None:
    host = AdbHost(old_server_stub.port)
    with pytest.raises(InfraError) as refused:
        AdbTransport("R5CT1", host.port).shell_argv([], terminal=False)
    assert f"the adb server on port {host.port} is version 40, and {find_adb()} version 41" in str(refused.value)
    assert "kill-server" in str(refused.value)
    # Without farm's protection, adb's own client ends this server.
    env = {**os.environ, **host.environment()}
    subprocess.run([find_adb(), "devices"], env=env, capture_output=True, check=False, timeout=60)
    assert old_server_stub.killed


def test_the_adb_that_suits_a_server_is_taken_the_users_own_first(
    old_server_stub: OldServerStub, server: AdbServer, tmp_path: Path
) -> None:
    assert suitable_adb(server) == find_adb()
    stub = tmp_path / "bin" / "adb"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 'Android Debug Bridge version 1.0.40'\n")
    stub.chmod(0o755)
    assert suitable_adb(AdbHost(old_server_stub.port)) == stub
    assert suitable_adb(server) == find_adb()


def test_a_server_that_cuts_large_outputs_is_warned_of(old_server_stub: OldServerStub, server: AdbServer) -> None:
    assert outdated(server) == ""
    assert outdated(AdbHost(old_server_stub.port)) == (
        f"the adb server on port {old_server_stub.port} is version 40, which cuts large outputs of devices: when "
        "the server is idle, end it with 'adb kill-server' and start version 41 or newer (platform-tools 29)"
    )
