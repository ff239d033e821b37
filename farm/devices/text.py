"""What a device says, made safe to store and to show."""

from __future__ import annotations

# How the C libraries of Android and Linux say ENOSPC and EDQUOT.
_FULL = ("no space left on device", "quota exceeded")

# Longer than every property and error message worth keeping on a line.
LINE_CHARACTERS = 200


def clean_text(said: bytes | str, limit: int = LINE_CHARACTERS, *, lines: bool = False) -> str:
    """Return at most `limit` characters of `said`, without control characters, bidirectional marks and outer blanks.

    Line ends survive only with `lines`. What is not UTF-8 or not printable becomes U+FFFD.
    """
    # Four bytes a character at most, so that a huge answer costs nothing.
    text = said[: limit * 4].decode("utf-8", errors="replace") if isinstance(said, bytes) else said[: limit * 4]
    kept = "\n\t" if lines else ""
    text = text.replace("\r\n", "\n").strip()
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)[:limit]


def says_full(reason: str) -> bool:
    """Tell whether a device's error message says that its storage is full."""
    return any(words in reason.casefold() for words in _FULL)
