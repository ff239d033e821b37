"""Temperature of a device before, during and after a long execution, if the device reports it."""

from __future__ import annotations

import threading
from typing import Self

from farm.base.errors import InfraError
from farm.devices.device import Device
from farm.devices.status import POLL_SECONDS, STATUS_SECONDS, read_status
from farm.devices.transport import Transport


class Thermometer:
    """Reads the temperature of a device as long as it is entered. A device that gives none has no readings."""

    def __init__(self, device: Device, transport: Transport, every_s: float = POLL_SECONDS) -> None:
        self._device, self._transport, self._every_s = device, transport, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="thermometer", daemon=True)
        self.readings: tuple[float, ...] = ()
        """Degrees Celsius, in the order of time: as `DeviceStatus.temperature_c`."""

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        # After an error the thread is not awaited, as the device may not answer.
        if error is None:
            self._thread.join(STATUS_SECONDS)
            if not self._thread.is_alive():
                self._read()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        try:
            celsius = read_status(self._transport, os=self._device.os).temperature_c
        except (InfraError, OSError):
            # The execution itself reports an absent device or a lost lease.
            return
        self.readings += () if celsius is None else (celsius,)
