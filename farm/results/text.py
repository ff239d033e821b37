"""Text from devices and tools, made fit to show: bounded, printable, without terminal escapes."""

from __future__ import annotations

import unicodedata

REASON_LIMIT = 400
LOG_LIMIT = 64 * 1024


def one_line(text: str, limit: int = REASON_LIMIT) -> str:
    """Return `text` on one line of at most `limit` characters; blanks run together, control characters go."""
    line = " ".join(_printable(text[: 16 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3].rstrip() + "..."


def bounded_log(text: str, limit: int = LOG_LIMIT) -> str:
    """Return the end of `text`, at most `limit` characters, where the reason usually is; says what was left out."""
    left_out = len(text) - limit
    text = _printable(text[-limit:])
    return f"[{left_out} characters left out]\n{text}" if left_out > 0 else text


def _printable(text: str) -> str:
    # Category C: control, format, surrogate, private use, unassigned.
    return "".join(c for c in text.replace("\r\n", "\n") if c in "\n\t" or unicodedata.category(c)[0] != "C")
