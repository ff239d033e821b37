"""What a device says, made safe to store and to show."""

from __future__ import annotations

from farm.base.text import spelled

# How the C libraries of Android and Linux say ENOSPC and EDQUOT.
_FULL = ("no space left on device", "quota exceeded")

# Longer than every property and error message worth keeping on a line.
LINE_CHARACTERS = 200
_ONE_LINE = str.maketrans({"\t": "\N{SYMBOL FOR HORIZONTAL TABULATION}", "\n": "\N{SYMBOL FOR NEWLINE}"})


def clean_text(raw: bytes | str, limit: int = LINE_CHARACTERS, *, lines: bool = False) -> str:
    """Return at most `limit` characters of `raw` without outer blanks, what is invisible spelled out by `system.text`.

    Line ends and tabs survive only with `lines`, and are spelled out otherwise. What is not UTF-8 becomes U+FFFD.
    """
    # Four bytes a character at most, so that a huge answer costs nothing.
    text = raw[: limit * 4].decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw[: limit * 4]
    text = spelled(text.replace("\r\n", "\n").strip())
    return (text if lines else text.translate(_ONE_LINE))[:limit]


def says_full(reason: str) -> bool:
    """Tell whether a device's error message says that its storage is full."""
    return any(words in reason.casefold() for words in _FULL)
