"""Crash logs of a device: logcat, tombstones, messages of kernel and DSP, all bounded in size."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from farm.base.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceTimeoutError
from farm.devices.execution.shell import shell_script
from farm.devices.text import clean_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.devices.transport import Transport

MOST_BYTES = 4 << 20
"""Most bytes of all files together."""

_SECONDS = 20.0
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
        ["sh", "-c", script, "sh", str(age), str(limit)], timeout_s=_SECONDS, max_output=limit + _SLACK_BYTES
    )
    # The replacement character of an undecodable byte has three bytes.
    text = clean_text(done.stdout, limit, lines=True).encode()[:limit]
    return text.decode(errors="ignore")
