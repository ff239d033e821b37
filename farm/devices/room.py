"""How much room a device has: asked in a shell, and what its answer means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.text import count_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# busybox's `df` knows no root file system that is in memory, as that of an initramfs is; not every `stat` has -f.
TELL_ROOM = "df -kP . 2>/dev/null | tail -n 1; stat -f -c 'blocks %a %S' . 2>/dev/null"
"""For a shell in the folder that is asked about; to be read by `free_bytes`."""

_MOST_BYTES = 1 << 60


def free_bytes(lines: Iterable[str]) -> int | None:
    """Return what TELL_ROOM says is free; None where it says nothing that can be believed. Pure."""
    for line in lines:
        words = line.split()
        # Of `df`: file system, size, used, available, share, place; a file system's name may have blanks in it.
        if words[:1] == ["blocks"] and len(words) == 3:
            count, unit = count_of(words[1]), count_of(words[2])
        else:
            count, unit = (count_of(words[-3]) if len(words) >= 6 else None), 1024
        if count is not None and unit is not None and count * unit <= _MOST_BYTES:
            return count * unit
    return None
