"""What a device's logs say about a crash: logcat, tombstones, the kernel's messages. Best effort, and bounded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from farm.devices.text import clean_text
from farm.errors import AdbServerError, DeviceError, DeviceGoneError, DeviceTimeoutError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.devices.transport import Transport

MOST_BYTES = 4 << 20
"""Of all files together."""

_SECONDS = 20.0
# What a shell says around what it was asked for.
_SLACK_BYTES = 64 * 1024

# $1: seconds since it began, $2: greatest number of bytes. Times are the device's own, whatever its clock says. Each
# prints nothing where there is nothing, or where nobody may read it.
_LOGCAT = """
start=$(date -d "@$(($(date +%s) - $1))" '+%m-%d %H:%M:%S.000' 2>/dev/null)
{ [ -n "$start" ] && logcat -d -v threadtime -t "$start" 2>/dev/null || logcat -d -v threadtime -t 3000 2>/dev/null; } |
    tail -c "$2"
"""
_TOMBSTONE = """
cd /data/tombstones 2>/dev/null || exit 0
newest=$(find . -maxdepth 1 -type f -name 'tombstone_*' ! -name '*.pb' -mmin "-$(($1 / 60 + 1))" \
    -exec ls -t {} + 2>/dev/null | head -n 1)
if [ -n "$newest" ]; then head -c "$2" -- "$newest"; fi
"""
_DMESG = 'dmesg 2>/dev/null | tail -n 1000 | tail -c "$2"'
_JOURNAL = 'journalctl -k -n 1000 --no-pager --since "-$1 seconds" 2>/dev/null | tail -c "$2"'


class _Source(NamedTuple):
    script: str
    share: float
    """Of all bytes."""


_SOURCES: Mapping[str, Mapping[str, _Source]] = {
    "android": {
        "logcat": _Source(_LOGCAT, 0.5),
        "tombstone": _Source(_TOMBSTONE, 0.25),
        "dmesg": _Source(_DMESG, 0.25),
    },
    "linux": {"dmesg": _Source(_DMESG, 0.5), "journal": _Source(_JOURNAL, 0.5)},
}


def collect_crash_logs(
    transport: Transport,
    os: Literal["android", "linux"],
    folder: Path,
    *,
    since: float,
    max_bytes: int = MOST_BYTES,
) -> dict[str, Path]:
    """Return what the device's logs say since `since`, a time as `time.time()` gives it, as text files by kind.

    Kinds are `logcat`, `tombstone`, `dmesg` and `journal`; those that a device does not have, or does not show to this
    user, are not there. The files are left in `folder`, which is made, and have `max_bytes` together. Never raises.
    """
    age = max(1, round(time.time() - since) + 1)
    found: dict[str, Path] = {}
    for kind, source in _SOURCES[os].items():
        limit = int(max_bytes * source.share)
        try:
            text = _ask(transport, source.script, age, limit)
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


def _ask(transport: Transport, script: str, age: int, limit: int) -> str:
    done = transport.run(
        ["sh", "-c", script, "sh", str(age), str(limit)], timeout_s=_SECONDS, max_output=limit + _SLACK_BYTES
    )
    # What stands for a byte that cannot be shown takes three.
    text = clean_text(done.stdout, limit, lines=True).encode()[:limit]
    return text.decode(errors="ignore")
