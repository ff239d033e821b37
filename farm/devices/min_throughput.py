"""Least speed of files: a device that drips is of no use."""

from __future__ import annotations

import time

from farm.base.errors import DeviceTimeoutError

BYTES_PER_SECOND = 64 * 1024
"""Least average speed of a transfer: a twentieth of USB 1, and reachable through a slow network's tunnel."""

# For what takes time and moves nothing: as many stalls as are let pass, and opening and closing a file.
_STALLS = 4
_FILE_SECONDS = 1.0


class MinThroughput:
    """The time that one transfer has: some for itself and for each file, and more with every byte that has moved."""

    def __init__(self, serial: str, files: int, stall_s: float) -> None:
        """`stall_s` is how long the device may move nothing at once."""
        self._serial, self._stall_s = serial, stall_s
        self._started = time.monotonic()
        self._allowed_s = _STALLS * stall_s + files * _FILE_SECONDS
        self._bytes = 0

    def moved(self, size: int) -> None:
        """Note that so many bytes came or went. Raises DeviceTimeoutError when the transfer is too slow."""
        self._bytes += size
        seconds = time.monotonic() - self._started
        if seconds > self._allowed_s + self._bytes / BYTES_PER_SECOND:
            rate = f"{BYTES_PER_SECOND // 1024} KiB/s"
            problem = f"moved {self._bytes} bytes of files in {seconds:.0f} s, at least {rate} is expected"
            raise DeviceTimeoutError(self._serial, f"{problem}: check its cable or network")

    def stalled(self) -> DeviceTimeoutError:
        """Return the error for a device that moved nothing for as long as it may."""
        problem = f"moved no byte of a file for {self._stall_s:g} s: check its cable or network, and its storage"
        return DeviceTimeoutError(self._serial, problem)
