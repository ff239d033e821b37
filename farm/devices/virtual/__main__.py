"""`python -m farm.devices.virtual --root DIR --soc SM8650`: one virtual device until it gets SIGTERM or Ctrl-C.

Prints one line of JSON with `port` and `serial` as soon as an adb server can connect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

from farm import __version__
from farm.base.errors import FarmError
from farm.base.paths import data_folder
from farm.devices.adb.protocol import VIRTUAL_PREFIX
from farm.devices.virtual.daemon import Daemon, listen
from farm.devices.virtual.faults import is_running
from farm.devices.virtual.tree import BUILDS, DeviceTree, device_properties

_SERIAL = re.compile(rf"{VIRTUAL_PREFIX}[A-Za-z0-9_-]{{1,48}}")


async def _serve(tree: DeviceTree, serial: str) -> None:
    with listen() as listener:
        serving = asyncio.create_task(Daemon(tree, tree.properties, listener).serve())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, serving.cancel)
        sys.stdout.write(json.dumps({"port": listener.getsockname()[1], "serial": serial}) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def _known_soc(name: str) -> str:
    """Return `name` when there is a profile for it. Raises UnknownNameError."""
    if re.fullmatch(r"\w+", name, re.ASCII) and (data_folder("device_profiles") / f"{name}.toml").is_file():
        return name
    # Imported for the error message alone: reading the profiles takes longer than the start.
    from farm.base.socs import find_soc

    return find_soc(name).name


def main() -> int:
    """Return 0 after an ordinary end, 2 for invalid arguments."""
    parser = argparse.ArgumentParser("python -m farm.devices.virtual", description="One virtual Snapdragon device.")
    parser.add_argument("--root", type=Path, required=True, help="folder of the device's files")
    parser.add_argument("--soc", required=True, help="SoC to simulate, such as SM8650")
    parser.add_argument("--serial", help=f"serial, such as {VIRTUAL_PREFIX}SM8650-0")
    parser.add_argument(
        "--build",
        choices=BUILDS,
        default=BUILDS[0],
        help="kind of Android build, which decides whether adbd can become root",
    )
    arguments = parser.parse_args()
    try:
        soc = _known_soc(arguments.soc)
        serial = arguments.serial or f"{VIRTUAL_PREFIX}{soc}-0"
        if not _SERIAL.fullmatch(serial):
            raise ValueError(f"--serial {serial!r} is not a name that begins with {VIRTUAL_PREFIX}")
        properties = device_properties(soc, serial, __version__, arguments.build)
        if is_running(arguments.root):
            raise ValueError(f"another virtual device runs in {arguments.root}")
        tree = DeviceTree(arguments.root, properties)
        # Umask of adbd; no other user can enter the folder.
        os.umask(0)
        asyncio.run(_serve(tree, serial))
    except (FarmError, OSError, ValueError) as error:
        sys.stderr.write(f"python -m farm.devices.virtual: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
