"""Text for the formats of a report: what XML allows, and what of a long log is shown. Pure."""

from __future__ import annotations

import re

from farm.system.text import without_colours

# What XML 1.0 does not allow, section 2.2.
_NOT_XML = "[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


def xml_text(text: str) -> str:
    """Return `text` without the characters that XML 1.0 does not allow, and without terminal colours."""
    return re.sub(_NOT_XML, "", without_colours(text))


def cut_log(text: str, limit: int) -> tuple[str, int, str]:
    """Return the head of a log, how many characters were cut after it, and the tail.

    What went wrong is usually told at the end, so the tail gets three quarters of `limit`.
    A log that fits is all head, and 0 are cut.
    """
    if len(text) <= limit:
        return text, 0, ""
    head = limit // 4
    tail = limit - head
    return text[:head], len(text) - head - tail, text[-tail:] if tail else ""
