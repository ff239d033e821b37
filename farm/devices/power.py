"""Power cycle of a device, by a command of its owner for a hub's port or a power strip."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from farm.base.config.devices import POWER_SERIAL
from farm.base.errors import DeviceError, DeviceTimeoutError
from farm.base.processes import ending, ready_of
from farm.devices.text import clean_text

if TYPE_CHECKING:
    from farm.devices.device import Device, PowerCommand

# Bytes that are kept from the end of the command's output.
_KEPT_BYTES = 4096
_LOOK_SECONDS = 0.1


def cycle_power(device: Device, command: PowerCommand) -> str:
    """Run the command without a shell, and return the end of its output as safe text.

    The command gets `device`'s serial for `{serial}`, and serial, name and SoC in $FARM_DEVICE_SERIAL,
    $FARM_DEVICE_NAME and $FARM_DEVICE_SOC. Only its own time limit ends the command, because an early end could leave
    the power off.
    Raises DeviceError for a failing command, DeviceTimeoutError at the limit.
    """
    if device.serial.startswith("-"):
        raise DeviceError(device.serial, "its serial begins with '-': the power command could take it for an option")
    argv = [word.replace(POWER_SERIAL, device.serial) for word in command.argv]
    facts = {"SERIAL": device.serial, "NAME": device.name, "SOC": device.soc}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **{f"FARM_DEVICE_{name}": value for name, value in facts.items()}},
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"its power command {argv[0]} cannot be started: {reason or error}"
        raise DeviceError(device.serial, problem) from None
    with process:
        try:
            printed = clean_text(_read(process, time.monotonic() + command.timeout_s), _KEPT_BYTES, lines=True)
        finally:
            # Children of the command may keep its streams open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    detail = f": {' '.join(printed.split())}" if printed.strip() else ""
    if process.returncode is None or process.returncode == -signal.SIGKILL:
        problem = f"its power command did not end in {command.timeout_s:g} s{detail}"
        raise DeviceTimeoutError(device.serial, problem)
    if process.returncode:
        raise DeviceError(device.serial, f"its power command ended with {ending(process.returncode)}{detail}")
    return printed


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the end of the output until the process ends, or until `deadline`."""
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    pipe, printed, open_ = process.stdout.fileno(), b"", True
    while process.poll() is None and time.monotonic() < deadline:
        if not open_:
            time.sleep(_LOOK_SECONDS)
        elif ready_of([pipe], _LOOK_SECONDS):
            data = os.read(pipe, 1 << 16)
            printed, open_ = (printed + data)[-_KEPT_BYTES:], bool(data)
    while open_ and ready_of([pipe], 0) and (data := os.read(pipe, 1 << 16)):
        printed = (printed + data)[-_KEPT_BYTES:]
        if time.monotonic() >= deadline:
            break
    return printed
