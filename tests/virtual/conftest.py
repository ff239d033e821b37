from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from adbd_device import DAEMONS, AdbdDevice
from attached import rack
from debian import unpack
from parts import do_without
from waiting import alive

from farm.base.errors import MissingToolError
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


# Debian release by version of its package `adb`; the newest version comes with adbutils.
_DEBIAN = {"29": "bookworm", "34": "trixie"}


def _old_adb(version: str, folder: Path, cache: Path) -> Path:
    """Return adb of a version, or skip the test; where parts are required, fail it."""
    try:
        root = unpack(["adb"], cache, suite=_DEBIAN[version])
    except MissingToolError as error:
        do_without(f"adb {version} cannot be had: {error}")
    # The program may need another C library than this machine's, so its own loader starts it.
    loader = next(path for path in sorted(root.glob("**/ld-linux*.so*")) if path.is_file())
    libraries = ":".join(sorted({str(path.parent) for path in root.glob("**/*.so.*") if path.is_file()}))
    words = [str(loader), "--library-path", libraries, str(root / "usr/lib/android-sdk/platform-tools/adb")]
    program = folder / "adb-program"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return program


@contextlib.contextmanager
def behind_adb(version: str, folder: Path, cache: Path) -> Iterator[Attached]:
    """Yield a device behind an adb server and client of a version: 29, 34 or 36."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            if version in _DEBIAN:
                program = _old_adb(version, folder, cache)
                patch.setattr("farm.devices.adb.server.find_adb", lambda: program)
            one = stack.enter_context(rack(folder, "SM8650"))
        serial = one.device.serial
        yield Attached(one.server, serial, one.folder(), one.supervisor.find(serial).pid)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory, farm_cache: Path) -> Iterator[Attached]:
    with behind_adb("36", tmp_path_factory.mktemp("virtual"), farm_cache) as one:
        yield one


@pytest.fixture(scope="session", params=[*DAEMONS, *(pytest.param(name, marks=pytest.mark.whole) for name in _DEBIAN)])
def any_device(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, farm_cache: Path
) -> Iterator[Attached]:
    """Device with farm's daemon, with Android's, and behind older versions of adb.

    An expectation that both daemons meet is true of phones.
    """
    if request.param == "adbd":
        real: AdbdDevice = request.getfixturevalue("adbd")
        yield Attached(real.server, real.serial, real.root, real.child.pid, real.alive)
    elif request.param == "farm":
        yield request.getfixturevalue("device")
    else:
        with behind_adb(request.param, tmp_path_factory.mktemp("old"), farm_cache) as one:
            yield one
