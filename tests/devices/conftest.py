from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from adbd_system import need_adbd

from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.system.processes import Supervisor
from farm.virtual.boot import boot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.devices.device import Device


@dataclass
class Bench:
    """A private adb server with two virtual devices behind it."""

    server: AdbServer
    devices: list[Device]
    root: Path

    def transport(self, number: int = 0) -> AdbTransport:
        return AdbTransport(self.devices[number].serial, self.server.port)

    def files(self, number: int = 0) -> Path:
        """Where the device's /data/local/tmp is on this machine."""
        return self.root / self.devices[number].serial / "data/local/tmp"


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bench")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, root / "adb")
        yield Bench(server, boot(supervisor, server, ["SM8650", "sm8750"], root), root)


@pytest.fixture(scope="session")
def built_in_bench(bench: Bench) -> Bench:
    """What `bench` is where a module has one of its own."""
    return bench


@pytest.fixture(scope="session")
def adbd_bench(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> Iterator[Bench]:
    """A device with Android's own daemon and tools, at an adb server of its own: other tests list their devices."""
    root = tmp_path_factory.mktemp("adbd")
    android = need_adbd(farm_cache)
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, root / "adb")
        yield Bench(server, boot(supervisor, server, ["SM8550"], root, android=android), root)
