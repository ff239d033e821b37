"""Virtual devices behind an adb server that stays: for farm they are attached, as phones are, and shared."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm_home import FarmHome
from ordinary_server import ordinary_adb_server

from farm.base.processes import Supervisor
from farm.devices.adb.server import AdbServer, start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.device import AdbAddress, Device
from farm.devices.virtual.boot import boot
from farm.devices.virtual.tree import BUILDS


@dataclass(frozen=True)
class Rack:
    """Virtual devices behind a private adb server, with their files in `root`."""

    supervisor: Supervisor
    server: AdbServer
    devices: list[Device]
    root: Path

    @property
    def device(self) -> Device:
        """The first device."""
        return self.devices[0]

    @property
    def env(self) -> dict[str, str]:
        return {"ANDROID_ADB_SERVER_PORT": str(self.server.port)}

    def folder(self, number: int = 0) -> Path:
        """The folder that holds the files of a device."""
        return self.root / self.devices[number].serial

    def files(self, number: int = 0) -> Path:
        """The folder of this machine behind the device's /data/local/tmp."""
        return self.folder(number) / "data/local/tmp"

    def transport(self, number: int = 0) -> AdbTransport:
        return AdbTransport(self.devices[number].serial, AdbAddress(self.server.port))


@contextlib.contextmanager
def rack(folder: Path, *socs: str) -> Iterator[Rack]:
    """Boot virtual devices behind a server of their own."""
    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, folder / "adb")
        yield Rack(supervisor, server, boot(supervisor, server, socs, folder), folder)


@dataclass(frozen=True)
class Attached:
    """Devices that every `farm` of a home sees."""

    home: FarmHome
    devices: list[Device]
    folder: Path
    server: AdbServer
    supervisor: Supervisor

    @property
    def port(self) -> int:
        """Return the port of the adb server."""
        return self.server.port

    @property
    def env(self) -> dict[str, str]:
        return {"ANDROID_ADB_SERVER_PORT": str(self.port)}

    def root(self, number: int) -> Path:
        """The folder that holds the files of a device."""
        return self.folder / "devices" / self.devices[number].serial

    def farm(
        self, *arguments: str, timeout_s: float = 120, user: str = "", code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` as `FarmHome.farm` does, as another user where one is named."""
        return self.home.farm(*arguments, timeout_s=timeout_s, env=self._env(user), code=code)

    def json(self, *arguments: str, **options: Any) -> Any:
        return self.home.json(*arguments, env=self.env, **options)

    @contextlib.contextmanager
    def running(self, *arguments: str, user: str = "") -> Iterator[subprocess.Popen[str]]:
        """Run `farm` in the background, as `FarmHome.running` does."""
        with self.home.running(*arguments, env=self._env(user)) as process:
            yield process

    def _env(self, user: str) -> Mapping[str, str]:
        return {**self.env, **({"LOGNAME": user, "USER": user} if user else {})}


@contextlib.contextmanager
def attach(
    home: FarmHome, folder: Path, socs: list[str], *, build: str = BUILDS[0], ordinary: bool = False
) -> Iterator[Attached]:
    """Boot virtual devices that no run has started; `ordinary`: behind a server that `adb kill-server` ends."""
    with contextlib.ExitStack() as stack:
        # The server outlives the devices, as they are ended without being detached.
        kept = stack.enter_context(ordinary_adb_server(folder)) if ordinary else None
        supervisor = stack.enter_context(Supervisor())
        server = kept or start_adb_server(supervisor, folder / "adb")
        devices = boot(supervisor, server, socs, folder / "devices", build=build)
        yield Attached(home, devices, folder, server, supervisor)
