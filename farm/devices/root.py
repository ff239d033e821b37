"""Root on a device: what the signed process domain of LPAI wants, and what adbd gives on builds for development."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from farm.devices.adb.host import AdbHost, acknowledge
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress
from farm.devices.text import clean_text
from farm.errors import DeviceError, DeviceTimeoutError, InfraError

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.devices.transport import Transport

# A phone's adbd is back within two or three seconds.
_BACK_SECONDS = 60.0
_ASK_SECONDS = 10.0
_POLL_SECONDS = 0.1
_ANSWER_BYTES = 512
_UID_BYTES = 4096

# What adbd answers, daemon/restart_service.cpp of AOSP's packages/modules/adb.
_RESTARTING = "restarting"
_PRODUCTION = "production builds"


def ensure_root(device: Device, *, timeout_s: float = _BACK_SECONDS) -> bool:
    """Make `device` run commands as root; return whether that was news.

    Where one behind adb does not do so yet, adbd is asked to start anew as root, as `adb root` does: the device goes
    away and comes back, and everything that ran on it ends. Raises DeviceError that says why it cannot be,
    DeviceTimeoutError when the device is not back within `timeout_s`.
    """
    transport = open_transport(device)
    try:
        if user_id(transport) == 0:
            return False
        if not isinstance(device.address, AdbAddress):
            raise DeviceError(device.serial, "root is needed: log in as root, or use another device")
        host = AdbHost(device.address.port, device.address.host)
        address = host.network_address(device.serial)
        said = _ask_for_root(host, device.serial)
        if _RESTARTING not in said:
            problem = f"root is needed, and adbd says {said!r}"
            if _PRODUCTION in said:
                problem += ": install a userdebug or eng build of its system, or use another device"
            raise DeviceError(device.serial, problem)
        _wait_for_root(transport, host, address, timeout_s)
    finally:
        transport.close()
    return True


def root_refusal(device: Device) -> str:
    """Return why `device` cannot run commands as root, without asking it to; empty when it does, or could."""
    transport = open_transport(device)
    try:
        if user_id(transport) == 0:
            return ""
        if not isinstance(device.address, AdbAddress):
            return "root is needed: log in as root"
        asked = transport.run(["getprop", "ro.debuggable"], timeout_s=_ASK_SECONDS, max_output=_UID_BYTES)
        production = "root is needed, and this is a production build: install a userdebug or eng build of its system"
        return "" if clean_text(asked.stdout) == "1" else production
    except DeviceError as error:
        return str(error).removeprefix(f"{device.serial}: ")
    finally:
        transport.close()


def user_id(transport: Transport) -> int:
    """Return the user that commands run as on a device, 0 for root. Raises DeviceError."""
    done = transport.run(["id", "-u"], timeout_s=_ASK_SECONDS, max_output=_UID_BYTES)
    said = clean_text(done.stdout)
    if done.code != 0 or not said.isdecimal() or not said.isascii():
        problem = f"does not say which user commands run as, but {said!r}"
        stderr = done.stderr.decode(errors="replace")
        raise DeviceError(transport.serial, problem, argv=["id", "-u"], code=done.code, stderr=stderr)
    return int(said)


def _ask_for_root(host: AdbHost, serial: str) -> str:
    """Return what adbd answers, which may be cut short by its end."""
    said = b""
    deadline = time.monotonic() + _ASK_SECONDS
    with host.open(serial, "root:", timeout_s=_ASK_SECONDS, argv=["root"]) as stream:
        try:
            while len(said) < _ANSWER_BYTES and (data := stream.recv(_ANSWER_BYTES)):
                acknowledge(stream)
                said += data
                stream.settimeout(max(0.01, deadline - time.monotonic()))
        except TimeoutError:
            raise DeviceTimeoutError(serial, f"adbd did not answer in {_ASK_SECONDS:g} s", argv=["root"]) from None
        except OSError:
            # Its end may reach us as a reset.
            pass
    return clean_text(said) or "nothing"


def _wait_for_root(transport: Transport, host: AdbHost, address: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    last = "it still runs commands as another user"
    while time.monotonic() < deadline:
        try:
            # Until it ends, the adbd of before answers as before.
            if user_id(transport) == 0:
                return
        except DeviceError as error:
            last = str(error).removeprefix(f"{transport.serial}: ")
            # The server looks for a device on USB all the time, but for one on a network only every ten seconds.
            if address:
                with contextlib.suppress(InfraError):
                    host.query(f"host:connect:{address}")
        time.sleep(_POLL_SECONDS)
    problem = f"adbd was asked to start anew as root, and {timeout_s:g} s later it is not there as root: {last}"
    raise DeviceTimeoutError(transport.serial, problem)
