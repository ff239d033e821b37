"""Adb server of a user, started as by `adb start-server`, on a port of the test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import free_port

from farm.devices.adb.host import AdbHost
from farm.devices.adb.server import AdbServer, find_adb, ordinary_server

# Variables that disable the search for devices of this machine.
_QUIET = {"ADB_MDNS": "0", "ADB_USB": "0", "ADB_EMU": "0"}


def kill_server(port: int) -> None:
    """Run a user's `adb kill-server`, and return once no process listens on the port."""
    subprocess.run([find_adb(), "-P", str(port), "kill-server"], capture_output=True, check=False, timeout=30)


@contextlib.contextmanager
def ordinary_adb_server(folder: Path) -> Iterator[AdbServer]:
    """Start a server for this process and its children; at the end, stop the server that listens on the port."""
    home = folder / "adb-home"
    home.mkdir()
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_QUIET, "HOME": str(home), "TMPDIR": str(home)}.items():
            patch.setenv(name, value)
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
        try:
            yield ordinary_server(start=True)
        finally:
            kill_server(port)
            assert not AdbHost(port).listens()
