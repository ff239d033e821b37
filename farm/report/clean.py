"""Makes text from a device, a compiler or a user fit to be shown: nothing invisible, nothing unbounded. Pure."""

from __future__ import annotations

import re
import unicodedata

# ECMA-48 control sequences (colours, cursor moves) and operating system commands (titles, links).
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)")
# Control, format (bidirectional overrides, zero width), surrogate, private and line-separator characters. Only compiled
# where it is needed: that takes as long as anything else of a short command.
_SUSPECT = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u070f\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)
# What XML 1.0 does not allow, section 2.2.
_NOT_XML = "[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


def visible(text: str) -> str:
    r"""Return `text` with terminal colours dropped and everything that is invisible or reorders text spelled out.

    NUL becomes its control picture, a right-to-left override becomes `\u202e`; tabs and line ends stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return re.sub(_SUSPECT, _spell, _ANSI.sub("", text).replace("\r\n", "\n"))


def one_line(text: str, limit: int = 0) -> str:
    """Return `text`, visible, on one line and not longer than `limit` characters (0: as long as it is)."""
    line = " ".join(visible(text).split())
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def xml_text(text: str) -> str:
    """Return `text` without the characters that XML 1.0 does not allow, and without terminal colours."""
    return re.sub(_NOT_XML, "", _ANSI.sub("", text))


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


def _spell(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(character) == "Zs":
        return " "
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
