"""Hostile text, also from devices, made safe for the store and for display: no invisible or reordering characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

# All packages use this module's definition of invisible. Pure.


# ECMA-48 control sequences (colours, cursor moves) and operating system commands (titles, links).
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)")
# Characters that neither a terminal nor a page shows: control characters except tab and line end; Unicode's
# Default_Ignorable_Code_Point (bidirectional marks, zero width, fillers) except variation selectors of emoji; line
# separators, surrogates, noncharacters. The string is compiled on first use, because compiling it takes a good part of
# a short command's time.
_UNSEEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u070f\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202f"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# As much as 64 bits hold.
_MOST_DIGITS = 18
HIDDEN = "***"
"""Text in the place of a secret."""
REASON_LIMIT = 400
"""Characters that are kept of a reason or a note."""
LOG_LIMIT = 64 * 1024
# Characters read per character of a line: further ones could only be blanks and colours.
_LOOKED_AT = 16


def visible(text: str) -> str:
    r"""Return `text` with terminal colours dropped and everything that is invisible or reorders text spelled out.

    NUL becomes its control picture, a right-to-left override becomes `\u202e`; tabs and line ends stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return spelled(without_colours(text).replace("\r\n", "\n"))


def spelled(text: str) -> str:
    """Return `text` with the same spelled out, and nothing dropped: terminal colours become visible text."""
    return re.sub(f"[{_UNSEEN}]", _spell, text)


def without_colours(text: str) -> str:
    """Return `text` without a terminal's control sequences."""
    return _ANSI.sub("", text)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with each of `secrets` hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def one_line(text: str, limit: int = 0) -> str:
    """Return `text`, visible, on one line and not longer than `limit` characters (0: as long as it is)."""
    line = " ".join(visible(text[: _LOOKED_AT * limit] if limit else text).split())
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"


def count_of(text: str) -> int | None:
    """Return the count that `text` is, of at most 18 digits; None for all else that a device may print."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def reason_line(text: str) -> str:
    """Return `text` as `one_line` does, as much of it as is kept of a reason."""
    return one_line(text, REASON_LIMIT)


def bounded_log(text: str, limit: int = LOG_LIMIT) -> str:
    """Return the end of `text`, at most `limit` characters, where the reason usually is, with a line about the cut."""
    left_out = len(text) - limit
    text = visible(text[-limit:])[-limit:]
    return f"[{left_out} characters left out]\n{text}" if left_out > 0 else text


def plain_json(data: bytes) -> bytes:
    r"""Return an equal JSON document, with invisible characters and ones that reorder text as `\uXXXX`."""
    # JSON itself spells out control characters below U+0020, but not DEL.
    if data.isascii():
        return data.replace(b"\x7f", b"\\u007f")
    return re.sub(f"[{_UNSEEN}]", _escape, data.decode()).encode()


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each of its texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [with_texts(one, change) for one in value]
    if isinstance(value, dict):
        return {change(str(key)): with_texts(one, change) for key, one in value.items()}
    return value


def json_document(answer: Any, indent: int = 2) -> bytes:
    """Return `answer` as JSON that a terminal can show."""
    import msgspec

    try:
        data = msgspec.json.encode(answer)
    except UnicodeEncodeError:
        # File names need not be text: Python keeps other bytes as lone surrogates, which JSON cannot represent.
        import json

        data = json.dumps(msgspec.to_builtins(answer), ensure_ascii=False).encode("utf-8", "replace")
    return plain_json(msgspec.json.format(data, indent=indent))


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


def _escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


# Text from devices, made safe for the store and for terminals.


# Texts of ENOSPC and EDQUOT in the C libraries of Android and Linux.
_FULL = ("no space left on device", "quota exceeded")

# Longer than every property and error message worth keeping on a line.
LINE_CHARACTERS = 200
_ONE_LINE = str.maketrans({"\t": "\N{SYMBOL FOR HORIZONTAL TABULATION}", "\n": "\N{SYMBOL FOR NEWLINE}"})


def clean_text(raw: bytes | str, limit: int = LINE_CHARACTERS, *, lines: bool = False) -> str:
    """Return at most `limit` characters of `raw` without outer blanks; `base.text` spells invisible characters out.

    Line ends and tabs survive only with `lines`. Bytes outside UTF-8 become U+FFFD.
    """
    # Four bytes a character at most, so that a huge answer costs nothing.
    text = raw[: limit * 4].decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw[: limit * 4]
    text = spelled(text.replace("\r\n", "\n").strip())
    return (text if lines else text.translate(_ONE_LINE))[:limit]


def named_values(lines: Iterable[bytes | str]) -> dict[str, list[str]]:
    """Return the values by name of a device's answer, `name=value` by line; as safe as `clean_text` makes them."""
    found: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = clean_text(line, 2 * LINE_CHARACTERS).partition("=")
        found.setdefault(name, []).append(value[:LINE_CHARACTERS].strip())
    return found


def says_full(reason: str) -> bool:
    """Return whether a device's error message means full storage."""
    return any(words in reason.casefold() for words in _FULL)
