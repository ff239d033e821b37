"""Presence of a device, its crash logs, and the end of what its former owners left there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceSpaceError, DeviceTimeoutError
from farm.base.text import LINE_CHARACTERS, clean_text, says_full
from farm.devices.execution.shell import shell_script
from farm.devices.facts import PRINT_BOOT
from farm.devices.transport import ANSWER_BYTES, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from farm.devices.execution.raw import ErrorCause
    from farm.devices.transport import Completed


# Presence of a device, reboots since the first look, and causes of its errors.


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


# The new owner of a device ends and removes what former owners left there: runners that still run, and their files.


_TAKEOVER_SECONDS = 60.0
_OUTPUT_BYTES = 256 * 1024
_STILL_ALIVE = 3


def take_over(transport: Transport, session: str) -> None:
    """End every runner that is not of the folder `session`, wait until it is gone, and remove its folder.

    For the owner of a lease only: it takes everything from others who use the device. Raises DeviceError, also for a
    process that does not end.
    """
    argv = ["sh", "-c", shell_script("take_over"), "sh", str(transport.storage), session, str(_STILL_ALIVE)]
    done = transport.run(argv, timeout_s=_TAKEOVER_SECONDS, max_output=_OUTPUT_BYTES)
    if done.code == _STILL_ALIVE:
        raise StagingError(
            transport.serial,
            f"a former owner's processes do not end, not even by SIGKILL: {clean_text(done.stdout)}: reboot it",
        )
    if done.code != 0:
        problem = "files of an earlier owner cannot be removed"
        raise DeviceError(transport.serial, problem, code=done.code, stderr=clean_text(done.stderr))


# Crash logs of a device: logcat, tombstones, messages of kernel and DSP, all bounded in size.


MOST_BYTES = 4 << 20
"""Most bytes of all files together."""

_CRASH_LOGS_SECONDS = 20.0
# Room for output of the shell around the log.
_SLACK_BYTES = 64 * 1024

_SHARES: Mapping[str, Mapping[str, float]] = {
    "android": {"logcat": 0.4, "tombstone": 0.2, "dmesg": 0.2, "dsp": 0.2},
    "linux": {"dmesg": 0.4, "journal": 0.4, "dsp": 0.2},
}
"""Part of all bytes by operating system and by the script of `shell` that prints a log (none without permission)."""


def collect_crash_logs(
    transport: Transport,
    os: Literal["android", "linux"],
    folder: Path,
    *,
    since: float,
    max_bytes: int = MOST_BYTES,
) -> dict[str, Path]:
    """Collect the device's log lines since `since`, a time of `time.time()`, and return text files by kind.

    Kinds are `logcat`, `tombstone`, `dmesg`, `journal`, and `dsp` for DSP lines of all logs; logs that the device lacks
    or hides from this user are left out. The files lie in `folder`, which is made, and have at most `max_bytes`
    together. Never raises.
    """
    age = max(1, round(time.time() - since) + 1)
    found: dict[str, Path] = {}
    for kind, share in _SHARES[os].items():
        limit = int(max_bytes * share)
        try:
            text = _read(transport, shell_script(kind), age, limit)
            if text:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{kind}.txt"
                path.write_text(text, encoding="utf-8")
                found[kind] = path
        except (DeviceGoneError, DeviceTimeoutError, AdbServerError):
            break
        except (DeviceError, OSError):
            continue
    return found


def _read(transport: Transport, script: str, age: int, limit: int) -> str:
    done = transport.run(
        ["sh", "-c", script, "sh", str(age), str(limit)], timeout_s=_CRASH_LOGS_SECONDS, max_output=limit + _SLACK_BYTES
    )
    # The replacement character of an undecodable byte has three bytes.
    text = clean_text(done.stdout, limit, lines=True).encode()[:limit]
    return text.decode(errors="ignore")
