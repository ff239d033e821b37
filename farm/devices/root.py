"""Root on a device: what the signed process domain of LPAI wants, and what adbd gives on builds for development."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from farm.devices.text import clean_text
from farm.errors import DeviceError

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.devices.transport import Transport

# A phone's adbd is back within two or three seconds.
_BACK_SECONDS = 60.0
_ASK_SECONDS = 10.0
_UID_BYTES = 4096


def ensure_root(device: Device, *, timeout_s: float = _BACK_SECONDS) -> bool:
    """Make `device` run commands as root; return whether it did not do so before: then what ran on it may have ended.

    Raises DeviceError that says why it cannot be, DeviceTimeoutError when the device is not back within `timeout_s`.
    """
    with contextlib.closing(device.address.open(device.serial)) as transport:
        if user_id(transport) == 0:
            return False
        transport.become_root(timeout_s)
    return True


def root_refusal(device: Device) -> str:
    """Return why `device` cannot run commands as root, without asking it to; empty when it does, or could."""
    with contextlib.closing(device.address.open(device.serial)) as transport:
        try:
            return "" if user_id(transport) == 0 else transport.root_refusal()
        except DeviceError as error:
            return str(error).removeprefix(f"{device.serial}: ")


def user_id(transport: Transport) -> int:
    """Return the user that commands run as on a device, 0 for root. Raises DeviceError."""
    done = transport.run(["id", "-u"], timeout_s=_ASK_SECONDS, max_output=_UID_BYTES)
    answer = clean_text(done.stdout)
    if done.code != 0 or not answer.isdecimal() or not answer.isascii():
        problem = f"does not say which user commands run as, but {answer!r}"
        stderr = done.stderr.decode(errors="replace")
        raise DeviceError(transport.serial, problem, argv=["id", "-u"], code=done.code, stderr=stderr)
    return int(answer)
