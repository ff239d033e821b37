from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from networks import Relay
from waiting import free_port, listens

from farm.base.errors import DeviceTimeoutError, InfraError
from farm.base.processes import Supervisor
from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress
from farm.devices.virtual.boot import boot


def test_a_private_server_keeps_to_itself(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "state")
        assert server.port != 5037
        environment = {**os.environ, **server.environment()}
        listed = subprocess.run([server.adb, "devices"], env=environment, capture_output=True, text=True, check=True)
        assert listed.stdout.strip() == "List of devices attached"
        assert (tmp_path / "state/.android/adbkey").is_file()
        # An adb of another version would end it by itself, and with it every run.
        killed = subprocess.run([server.adb, "kill-server"], env=environment, capture_output=True, check=False)
        assert killed.returncode != 0
        assert listens(server.port)
    assert not listens(server.port)


def test_what_does_not_listen_cannot_be_attached(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path)
        with pytest.raises(InfraError, match="cannot attach 127.0.0.1:"):
            server.connect("127.0.0.1", free_port())


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python knows no IPv6")
def test_a_device_is_attached_by_an_ipv6_address(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path)
        host = AdbHost(server.port)
        near = host.network_address(device.serial)
        host.query(f"host:disconnect:{near}")
        try:
            line = Relay(int(near.split(":")[1]), host="::1")
        except OSError:
            pytest.skip("this machine has no ::1")
        with contextlib.closing(line):
            assert server.connect("::1", line.port) == f"[::1]:{line.port}"
            assert host.network_address(device.serial) == f"[::1]:{line.port}"
            assert (
                AdbTransport(device.serial, AdbAddress(server.port)).run(["echo", "hi"], timeout_s=20).stdout == b"hi\n"
            )
            host.query(f"host:disconnect:[::1]:{line.port}")


def test_a_cut_behind_a_forward_that_acknowledges_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.devices.transport.SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("farm.devices.adb.transport.ASK_SECONDS", 1.0)
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path)
        near = server.network_address(device.serial)
        server.query(f"host:disconnect:{near}")
        with contextlib.closing(Relay(int(near.split(":")[1]))) as line, ThreadPoolExecutor(1) as pool:
            server.connect("127.0.0.1", line.port)
            transport = AdbTransport(device.serial, AdbAddress(server.port))
            # A program may stay silent for any time while the device answers.
            assert transport.run(["sleep", "2"], timeout_s=20).code == 0
            running = pool.submit(lambda: transport.run(["sleep", "600"], timeout_s=600))
            with pytest.raises(TimeoutError):
                running.result(1)
            line.cut()
            with pytest.raises(DeviceTimeoutError, match="did not open a stream in 1 s: is it hanging"):
                running.result(30)
            line.restore()
