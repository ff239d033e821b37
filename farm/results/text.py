"""How much of a text is kept with an attempt."""

from __future__ import annotations

from farm.system import text as any_text
from farm.system.text import visible

REASON_LIMIT = 400
LOG_LIMIT = 64 * 1024


def one_line(text: str, limit: int = REASON_LIMIT) -> str:
    """Return `text` as `farm.system.text.one_line` does, at most `limit` characters of it."""
    return any_text.one_line(text, limit)


def bounded_log(text: str, limit: int = LOG_LIMIT) -> str:
    """Return the end of `text`, at most `limit` characters, where the reason usually is; says what was left out."""
    left_out = len(text) - limit
    text = visible(text[-limit:])[-limit:]
    return f"[{left_out} characters left out]\n{text}" if left_out > 0 else text
