"""Presence of a device, reboots since the first look, and causes of its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceSpaceError
from farm.devices.identity import PRINT_BOOT
from farm.devices.text import LINE_CHARACTERS, clean_text, says_full
from farm.devices.transport import ANSWER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.devices.execution.raw import ErrorCause
    from farm.devices.transport import Completed, Transport

# A device that is busy with a job may take some seconds to start a shell.
_ASK_SECONDS = 15.0


class Liveness:
    """Presence of one device in the same boot of its system. Safe for several threads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._boot = ""

    def learn(self, boot: bytes) -> None:
        """Note what PRINT_BOOT printed, the first time."""
        self._boot = self._boot or clean_text(boot)

    def demand(self) -> None:
        """Raise LostError for a device that does not answer or has started anew, AdbServerError for its adb server."""
        serial, argv = self._transport.serial, ["sh", "-c", PRINT_BOOT]
        try:
            boot = clean_text(self._transport.run(argv, timeout_s=_ASK_SECONDS, max_output=ANSWER_BYTES).stdout)
        except AdbServerError:
            raise
        except DeviceGoneError:
            raise LostError(serial, "it is no longer there") from None
        except DeviceError:
            raise LostError(serial, "it does not answer any more") from None
        before, self._boot = self._boot, boot or self._boot
        if before and boot and before != boot:
            raise LostError(serial, "it was rebooted")


class StagingError(DeviceError):
    """A device that could be reached did not do what an execution needs."""


def staging_error(serial: str, problem: str, done: Completed, argv: Sequence[str] = ()) -> DeviceError:
    """Return the error for a script that failed on a device: DeviceSpaceError for full storage, else StagingError."""
    stderr = done.stderr.decode(errors="replace").strip()
    kind = DeviceSpaceError if says_full(stderr) else StagingError
    return kind(serial, problem, argv=argv, code=done.code, stderr=clean_text(stderr[-LINE_CHARACTERS:]))


class DamagedError(DeviceError):
    """File on a device whose content differs from the pushed one after each push."""


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
    """Return the cause of an error; an error without a class of its own counts as the connection."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "connection")
