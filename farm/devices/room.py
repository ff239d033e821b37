"""Free space of a device: the shell code that asks for it, and the reader of its output."""

from __future__ import annotations

from collections.abc import Iterable

from farm.base.text import count_of

# Two programs: busybox's `df` fails on the root file system of an initramfs; some versions of `stat` lack -f.
TELL_ROOM = "df -kP . 2>/dev/null | tail -n 1; stat -f -c 'blocks %a %S' . 2>/dev/null"
"""Shell code, run in the folder in question; `free_bytes` reads its output."""

_MOST_BYTES = 1 << 60


def free_bytes(lines: Iterable[str]) -> int | None:
    """Return the free bytes in the output of TELL_ROOM; None for an implausible output. Pure."""
    for line in lines:
        words = line.split()
        # Columns of `df`: file system (may contain blanks), size, used, available, share, place.
        if words[:1] == ["blocks"] and len(words) == 3:
            count, unit = count_of(words[1]), count_of(words[2])
        else:
            count, unit = (count_of(words[-3]) if len(words) >= 6 else None), 1024
        if count is not None and unit is not None and count * unit <= _MOST_BYTES:
            return count * unit
    return None
