"""Starts virtual devices, all at the same time, and attaches them to an adb server."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.devices.adb.names import VIRTUAL_PREFIX
from farm.devices.device import LOOPBACK, AdbAddress
from farm.devices.identity import identify
from farm.errors import InfraError
from farm.suites.socs import find_soc
from farm.virtual.faults import randomize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.adb.server import AdbServer
    from farm.devices.device import Device
    from farm.system.processes import Child, Supervisor

# Takes a fifth of a second on an idle machine.
_BOOT_SECONDS = 30.0


def boot(
    supervisor: Supervisor,
    adb_server: AdbServer,
    socs: Sequence[str],
    root: Path,
    *,
    build: str = "userdebug",
    fault_rate: float = 0.0,
    fault_seed: int = 0,
    fault_kinds: Sequence[str] = (),
) -> list[Device]:
    """Start one virtual device per entry of `socs` and return them, in that order, ready to be used.

    The n-th device of an SoC is `virtual-SM8650-n`, and its files are in the folder of that name in `root`: what an
    earlier life left there is still there. `build` is one of `farm.virtual.root.BUILDS`. Once all of them are up, each
    of their operations meets a fault with the probability `fault_rate`, of `fault_kinds` or of all kinds; the same
    faults for the same seed. Raises UnknownNameError before anything is started, and InfraError, with the log of the
    device, when one does not come up.
    """
    seen: Counter[str] = Counter()
    serials: dict[str, str] = {}
    for name in socs:
        soc = find_soc(name).name
        serials[f"{VIRTUAL_PREFIX}{soc}-{seen[soc]}"] = soc
        seen[soc] += 1
    if not serials:
        return []
    children = [start_device(supervisor, serial, soc, root, build) for serial, soc in serials.items()]
    try:
        with ThreadPoolExecutor(max_workers=min(16, len(children))) as pool:
            devices = list(pool.map(partial(attach_device, adb_server), children))
        if fault_rate:
            for serial in serials:
                randomize(root / serial, fault_rate, fault_seed, fault_kinds)
    except BaseException:
        for child in children:
            child.terminate()
        raise
    return devices


def start_device(supervisor: Supervisor, serial: str, soc: str, root: Path, build: str) -> Child:
    """Start the daemon of a virtual device, with its files in the folder `serial` of `root`."""
    # No site packages: the daemon needs none, and looking through them doubles its start.
    argv: list[str | Path] = [
        sys.executable,
        "-S",
        "-m",
        "farm.virtual",
        "--root",
        root / serial,
        "--soc",
        soc,
        "--serial",
        serial,
        "--build",
        build,
    ]
    package = Path(__file__).resolve().parents[2]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(package)}
    log = root / f"{serial}.log"
    return supervisor.spawn(argv, name=serial, env=environment, stdout_pipe=True, stderr=log)


def attach_device(adb_server: AdbServer, child: Child) -> Device:
    """Wait until a daemon listens, and return its device as `adb_server` knows it. Raises InfraError."""
    try:
        ready = msgspec.json.decode(child.first_line(_BOOT_SECONDS))
        adb_server.connect(LOOPBACK, ready["port"], timeout_s=_BOOT_SECONDS)
        address = AdbAddress(adb_server.port, attached_at=f"{LOOPBACK}:{ready['port']}")
        return identify(ready["serial"], address)
    except (InfraError, msgspec.DecodeError) as error:
        # What adb says of a device that has ended in between is no help.
        if isinstance(error, InfraError) and child.process.poll() is None:
            raise
        why = child.why_silent(_BOOT_SECONDS)
        child.terminate()
        raise InfraError(f"the virtual device {child.name} did not start: {why}") from None
