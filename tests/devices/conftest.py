from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress, Device
from farm.devices.virtual.boot import boot


@dataclass
class Bench:
    """A private adb server with two virtual devices behind it."""

    server: AdbServer
    devices: list[Device]
    root: Path

    def transport(self, number: int = 0) -> AdbTransport:
        return AdbTransport(self.devices[number].serial, AdbAddress(self.server.port))

    def files(self, number: int = 0) -> Path:
        """Return the folder of this machine behind the device's /data/local/tmp."""
        return self.root / self.devices[number].serial / "data/local/tmp"


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bench")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, root / "adb")
        yield Bench(server, boot(supervisor, server, ["SM8650", "sm8750"], root), root)
