"""The user's own adb server, as `adb start-server` starts it: it ends, others start it, it is of any version."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
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
from farm.devices.device import AdbAddress
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


class Version40Stub(socketserver.BaseRequestHandler):
    """Connection to a stub of an adb server, which gives a version that no package has and answers nothing else."""

    def handle(self) -> None:
        size = int(self.request.recv(4, socket.MSG_WAITALL), 16)
        if self.request.recv(size, socket.MSG_WAITALL) == b"host:version":
            self.request.sendall(b"OKAY00040028")


@pytest.fixture
def old_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdbHost]:
    """Old server; the only adb on PATH is the test's program in the folder `bin`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Version40Stub) as stub:
        threading.Thread(target=stub.serve_forever, args=(0.05,)).start()
        yield AdbHost(stub.server_address[1])
        stub.shutdown()


def test_no_client_of_another_version_is_let_near_a_server(old_server: AdbHost) -> None:
    """A client of another version ends a server."""
    with pytest.raises(InfraError) as refused:
        AdbTransport("R5CT1", AdbAddress(old_server.port)).shell_argv([], terminal=False)
    assert f"the adb server on port {old_server.port} is version 40, and {find_adb()} version 41" in str(refused.value)
    assert "kill-server" in str(refused.value)


def test_the_adb_that_suits_a_server_is_taken_the_users_own_first(
    old_server: AdbHost, server: AdbServer, tmp_path: Path
) -> None:
    assert suitable_adb(server) == find_adb()
    stub = tmp_path / "bin" / "adb"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 'Android Debug Bridge version 1.0.40'\n")
    stub.chmod(0o755)
    assert suitable_adb(old_server) == stub
    assert suitable_adb(server) == find_adb()
    # Large outputs are cut by old servers.
    assert outdated(server) == ""
    assert outdated(old_server).startswith(
        f"the adb server on port {old_server.port} is version 40, which cuts large outputs of devices"
    )
