"""Keeps virtual devices up that nobody else would start again: their daemons, and the adb server before them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from farm.errors import FarmError
from farm.system.processes import ending
from farm.virtual.boot import attach_device, start_device
from farm.virtual.root import BUILDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from farm.devices.adb.server import AdbServer
    from farm.devices.device import Device
    from farm.system.processes import Supervisor

MOST_STARTS = 5
"""So often a device is started again; one that ends once more is left to whoever waits for it."""

# What ended it, a full disk for example, may be over then.
_PAUSE_SECONDS = 2.0


class Reviver:
    """The virtual devices of `devices` that `supervisor` has started, with their files in `root`."""

    def __init__(self, supervisor: Supervisor, server: AdbServer, devices: Sequence[Device], root: Path) -> None:
        self._supervisor, self._server, self._root = supervisor, server, root
        self._devices = list(devices)
        self._starts: Counter[str] = Counter()
        self._next_s: dict[str, float] = {}

    def revive(self, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Start what has ended again, and return a line for each that is back. Raises InfraError for the adb server."""
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
