"""Starts virtual devices, attaches them to an adb server, and keeps them up."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, InfraError
from farm.base.processes import Child, Supervisor, ending
from farm.base.socs import find_soc
from farm.devices.adb.names import VIRTUAL_PREFIX
from farm.devices.device import LOOPBACK, AdbAddress, Device
from farm.devices.identity import identify
from farm.devices.virtual.faults import randomize
from farm.devices.virtual.tree import BUILDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.devices.adb.server import AdbServer

# Takes a fifth of a second on an idle machine.
_BOOT_SECONDS = 30.0

MOST_STARTS = 5
"""Most starts of a device after its end; then the device stays away."""

# Delay before a new start, as the cause of the end, such as a full disk, may be temporary.
_PAUSE_SECONDS = 2.0


def boot(
    supervisor: Supervisor,
    adb_server: AdbServer,
    socs: Sequence[str],
    root: Path,
    *,
    build: str = BUILDS[0],
    fault_rate: float = 0.0,
    fault_seed: int = 0,
    fault_kinds: Sequence[str] = (),
    before: Callable[[Path], None] = lambda _: None,
) -> list[Device]:
    """Start one virtual device per entry of `socs` and return them, in that order, ready to be used.

    The n-th device of an SoC is `virtual-SM8650-n`; the folder of that name in `root` keeps the files of all its
    starts; `before` is called with it before the first start. `build` is an entry of `tree.BUILDS`. Once all devices
    are up, each operation meets a fault with the probability `fault_rate`, of `fault_kinds` or of all kinds; equal
    seeds give equal faults. Raises UnknownNameError before the first start, and InfraError with the log of a device
    that does not start.
    """
    seen: Counter[str] = Counter()
    serials: dict[str, str] = {}
    for name in socs:
        soc = find_soc(name).name
        serials[f"{VIRTUAL_PREFIX}{soc}-{seen[soc]}"] = soc
        seen[soc] += 1
    if not serials:
        return []
    for serial in serials:
        before(root / serial)
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
    argv: list[str | Path] = [sys.executable, "-S", "-P", "-m", "farm.devices.virtual", "--root", root / serial]
    argv += ["--soc", soc, "--serial", serial, "--build", build]
    package = Path(__file__).resolve().parents[3]
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
        # adb's message is useless if the device ended in between.
        if isinstance(error, InfraError) and child.process.poll() is None:
            raise
        why = child.why_silent(_BOOT_SECONDS)
        child.terminate()
        raise InfraError(f"the virtual device {child.name} did not start: {why}") from None


class Reviver:
    """The virtual devices of `devices` that `supervisor` has started, with their files in `root`."""

    def __init__(self, supervisor: Supervisor, server: AdbServer, devices: Sequence[Device], root: Path) -> None:
        self._supervisor, self._server, self._root = supervisor, server, root
        self._devices = list(devices)
        self._starts: Counter[str] = Counter()
        self._next_s: dict[str, float] = {}

    def revive(self, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Start ended devices again and return a line for each. Raises InfraError for the adb server."""
        lines = []
        if self._server.revive(self._supervisor):
            lines.append("the adb server had died and was started again")
        for device in self._devices:
            child = self._supervisor.find(device.serial)
            code = child.process.poll()
            now = clock()
            if code is None or self._starts[device.serial] >= MOST_STARTS or now < self._next_s.get(device.serial, now):
                continue
            self._starts[device.serial] += 1
            self._next_s[device.serial] = now + _PAUSE_SECONDS
            how = ending(code)
            try:
                again = start_device(self._supervisor, device.serial, device.soc, self._root, BUILDS[0])
                attach_device(self._server, again)
            except (FarmError, OSError) as error:
                lines.append(f"{device.serial} had ended with {how} and does not start again: {error}")
            else:
                lines.append(f"{device.serial} had ended with {how} and was started again")
        return lines
