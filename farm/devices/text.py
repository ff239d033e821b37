"""Text from devices, made safe for the store and for terminals."""

from __future__ import annotations

from collections.abc import Iterable

from farm.base.text import spelled

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
