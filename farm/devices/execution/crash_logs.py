"""What a device's logs say about a crash: logcat, tombstones, the kernel's and the DSP's messages. Bounded."""

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
"""Of all files together."""

_SECONDS = 20.0
# What a shell says around what it was asked for.
_SLACK_BYTES = 64 * 1024

_SHARES: Mapping[str, Mapping[str, float]] = {
    "android": {"logcat": 0.4, "tombstone": 0.2, "dmesg": 0.2, "dsp": 0.2},
    "linux": {"dmesg": 0.4, "journal": 0.4, "dsp": 0.2},
}
"""Of all bytes, by operating system and by the script of `shell` that prints a log, or nothing where it may not."""


def collect_crash_logs(
    transport: Transport,
    os: Literal["android", "linux"],
    folder: Path,
    *,
    since: float,
    max_bytes: int = MOST_BYTES,
) -> dict[str, Path]:
    """Return what the device's logs say since `since`, a time as `time.time()` gives it, as text files by kind.

    Kinds are `logcat`, `tombstone`, `dmesg`, `journal` and, what of all logs is of the DSP, `dsp`; those that a device
    does not have, or does not show to this user, are not there. The files are left in `folder`, which is made, and have
    `max_bytes` together. Never raises.
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
    # What stands for a byte that cannot be shown takes three.
    text = clean_text(done.stdout, limit, lines=True).encode()[:limit]
    return text.decode(errors="ignore")
