"""What went wrong on a device, by its kind: an error -> the cause that a raw result carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceSpaceError

if TYPE_CHECKING:
    from farm.execution.raw import ErrorCause


class StagingError(DeviceError):
    """A device that could be reached did not do what an execution needs."""


class DamagedError(DeviceError):
    """A file on a device is not what was pushed, again and again."""


class LostError(DeviceGoneError):
    """A device was asked whether it is still there, and is not, or has started anew."""


_CAUSES: tuple[tuple[type[DeviceError], ErrorCause], ...] = (
    (DeviceGoneError, "gone"),
    (DeviceSpaceError, "space"),
    (AdbServerError, "adb_server"),
    (DamagedError, "damage"),
    (StagingError, ""),
)


def cause_of(error: DeviceError) -> ErrorCause:
    """Return the cause of an error; what a transport has no better word for is the connection."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "connection")
