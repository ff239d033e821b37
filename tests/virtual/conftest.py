from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from adbd_device import DAEMONS, AdbdDevice
from ssh_server import alive

from farm.base.processes import Supervisor
from farm.devices.adb.protocol import adb_target
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.virtual.boot import boot


@dataclass
class Attached:
    """Virtual device, used by the adb command as by a person."""

    server: AdbServer
    serial: str
    root: Path
    pid: int
    alive: Callable[[int], bool] = alive
    """Function that returns whether a process of the device runs, by the device's number."""

    def command(self, *words: str | Path) -> list[str]:
        return [str(self.server.adb), "-s", adb_target(self.serial), *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.server.environment()}

    def adb(self, *words: str | Path, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(*words), input=stdin, env=self.environment, capture_output=True, timeout=120, check=check
        )


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    root = tmp_path_factory.mktemp("virtual")
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, root / "adb")
        (one,) = boot(supervisor, server, ["SM8650"], root)
        yield Attached(server, one.serial, root / one.serial, supervisor.find(one.serial).pid)


@pytest.fixture(scope="session", params=DAEMONS)
def any_device(request: pytest.FixtureRequest) -> Attached:
    """Device with farm's daemon, and device with Android's: an expectation that both meet is true of phones."""
    if request.param == "adbd":
        real: AdbdDevice = request.getfixturevalue("adbd")
        return Attached(real.server, real.serial, real.root, real.child.pid, real.alive)
    device: Attached = request.getfixturevalue("device")
    return device
