"""The new owner of a device ends and removes what former owners left there: runners that still run, and their files."""

from __future__ import annotations

from farm.base.errors import DeviceError
from farm.devices.execution.liveness import StagingError
from farm.devices.execution.shell import shell_script
from farm.devices.text import clean_text
from farm.devices.transport import Transport

_SECONDS = 60.0
_OUTPUT_BYTES = 256 * 1024
_STILL_ALIVE = 3


def take_over(transport: Transport, session: str) -> None:
    """End every runner that is not of the folder `session`, wait until it is gone, and remove its folder.

    For the owner of a lease only: it takes everything from others who use the device. Raises DeviceError, also for a
    process that does not end.
    """
    argv = ["sh", "-c", shell_script("take_over"), "sh", str(transport.storage), session, str(_STILL_ALIVE)]
    done = transport.run(argv, timeout_s=_SECONDS, max_output=_OUTPUT_BYTES)
    if done.code == _STILL_ALIVE:
        raise StagingError(
            transport.serial,
            f"a former owner's processes do not end, not even by SIGKILL: {clean_text(done.stdout)}: reboot it",
        )
    if done.code != 0:
        problem = "files of an earlier owner cannot be removed"
        raise DeviceError(transport.serial, problem, code=done.code, stderr=clean_text(done.stderr))
