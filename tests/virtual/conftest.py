from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from adbd_device import DAEMONS, AdbdDevice
from attached import rack
from waiting import alive

from farm.devices.adb.protocol import adb_target
from farm.devices.adb.server import AdbServer


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
    with rack(tmp_path_factory.mktemp("virtual"), "SM8650") as one:
        serial = one.device.serial
        yield Attached(one.server, serial, one.folder(), one.supervisor.find(serial).pid)


@pytest.fixture(scope="session", params=DAEMONS)
def any_device(request: pytest.FixtureRequest) -> Attached:
    """Device with farm's daemon, and device with Android's: an expectation that both meet is true of phones."""
    if request.param == "adbd":
        real: AdbdDevice = request.getfixturevalue("adbd")
        return Attached(real.server, real.serial, real.root, real.child.pid, real.alive)
    device: Attached = request.getfixturevalue("device")
    return device
