"""An adb server as `adb start-server` starts a user's own: one that `adb kill-server` ends, on a port of the test's."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import find_adb, ordinary_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.devices.adb.server import AdbServer

# Nothing of this machine is looked for.
_QUIET = {"ADB_MDNS": "0", "ADB_USB": "0", "ADB_EMU": "0"}


def kill_server(port: int) -> None:
    """Do what a user does with `adb kill-server`, and return once nobody listens there."""
    subprocess.run([find_adb(), "-P", str(port), "kill-server"], capture_output=True, check=False, timeout=30)


@contextlib.contextmanager
def ordinary_adb_server(folder: Path) -> Iterator[AdbServer]:
    """Start one, for this process and those that it starts; whichever listens on its port in the end is ended."""
    home = folder / "adb-home"
    home.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_QUIET, "HOME": str(home), "TMPDIR": str(home)}.items():
            patch.setenv(name, value)
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
        try:
            yield ordinary_server(start=True)
        finally:
            kill_server(port)
            assert not AdbHost(port).listens()
