"""A run's own virtual devices are started again when something ends them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from farm.base.processes import Supervisor
from farm.devices.adb.server import start_adb_server
from farm.devices.connect import open_transport
from farm.devices.virtual.boot import MOST_STARTS, Reviver, boot

SERIAL = "virtual-SM8650-0"


def test_a_device_and_the_adb_server_that_were_killed_are_back_with_the_same_serial_and_files(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        devices = boot(supervisor, server, ["SM8650", "SM8650"], tmp_path / "devices")
        reviver = Reviver(supervisor, server, devices, tmp_path / "devices")
        assert reviver.revive() == []
        transport = open_transport(devices[0])
        assert transport.run(["sh", "-c", "echo kept > /data/local/tmp/kept"], timeout_s=20).code == 0
        for name in (SERIAL, "adb server"):
            kill(supervisor, name)
        lines = reviver.revive()
        assert lines == [
            "the adb server had died and was started again",
            f"{SERIAL} had ended with signal 9 and was started again",
        ]
        assert transport.run(["cat", "/data/local/tmp/kept"], timeout_s=20).stdout == b"kept\n"
        transport.close()
        assert reviver.revive() == []


def test_one_that_ends_again_and_again_is_left_alone(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        [device] = boot(supervisor, server, ["SM8650"], tmp_path / "devices")
        reviver = Reviver(supervisor, server, [device], tmp_path / "devices")
        for number in range(MOST_STARTS + 1):
            kill(supervisor, SERIAL)
            lines = reviver.revive(lambda: 10.0 * number)  # noqa: B023 - it is called here
            assert len(lines) == (number < MOST_STARTS), lines


def kill(supervisor: Supervisor, name: str) -> None:
    child = supervisor.find(name)
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()
