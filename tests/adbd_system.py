"""The root folder of devices with a real adbd, for tests; and how their processes are found on this machine."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

import pytest

from farm.errors import MissingToolError
from farm.virtual.android.system import android_system

# Read before the tests take farm's variables out of the environment.
REQUIRED = os.environ.get("FARM_REQUIRE_PARTS") == "1"

DAEMONS = ["built-in", pytest.param("adbd", marks=pytest.mark.whole)]
"""For tests of both."""


def need_adbd(cache_dir: Path) -> Path:
    """Return what `boot(..., android=...)` wants, with a Python for stubs, or skip; fail where parts are required."""
    found = _found(cache_dir)
    if isinstance(found, Path):
        return found
    if REQUIRED:
        pytest.fail(f"FARM_REQUIRE_PARTS=1 and there is no adbd: {found}")
    pytest.skip(f"there is no adbd: {found}")


@cache
def _found(cache_dir: Path) -> Path | str:
    try:
        return android_system(cache_dir, also=["python3"])
    except MissingToolError as error:
        return str(error)


def processes_on(root: Path) -> dict[int, str]:
    """Return the command lines of what runs on the device with its files in `root`, by its own process ids."""
    found = {}
    data = (root / "data").stat()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if os.path.samestat((folder / "root/data").stat(), data):
                lines = (folder / "status").read_text().splitlines()
                values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                if values["State"][0] not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(values["NSpid"].split()[-1])] = command.decode(errors="replace")
    return found


def alive_on(root: Path, number: int) -> bool:
    """Tell whether a process runs that the device calls `number`."""
    return number in processes_on(root)
