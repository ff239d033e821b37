"""Layout of terminal lines: columns, wrapped and cut text, titled lists. Pure.

`columns` replaces `rich.Table`: the import of rich takes 33 ms, a tenth of a short command, and a thousand rows of
eight columns take 0.4 s.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

from farm.base.text import one_line

WIDTH, LEAST_WIDTH = 80, 40
UNBOUNDED = 100_000
"""Width of output that is no terminal: more than any line has."""
SIMULATED = "VIRTUAL: times and cycles are of a simulator, not comparable with hardware"

STUBBED = "STUB: a stub took the place of QNN's libraries; no number is a measurement of Qualcomm's products"
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}


def styled(text: str, style: str = "") -> str:
    """Return a text in a style such as `bold red`, with the control sequences of a terminal; "" is no style."""
    codes = ";".join(str(_CODES[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "") -> list[str]:
    """Return rows with their cells aligned; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )).rstrip()
        for row in rows
    ]  # fmt: skip


def fitted(line: str, width: int) -> str:
    """Return a line cut to `width`, with its indentation."""
    indent = len(line) - len(line.lstrip())
    return " " * indent + one_line(line, width - indent)


def wrapped(text: str, width: int = WIDTH, hanging: str = "  ", *, whole_words: bool = True) -> list[str]:
    """Return a text in lines with its indentation; lines after the first are indented further by `hanging`."""
    indent = " " * (len(text) - len(text.lstrip(" ")))
    lines = textwrap.wrap(
        # A per cent sign stays with its number.
        one_line(text).replace(" %", "\u00a0%"),
        width,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=not whole_words,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def wrapped_in(style: str, text: str, width: int) -> list[str]:
    """Return a text in lines of a style; words longer than a line are cut."""
    return [styled(line, style) for line in wrapped(text, width, whole_words=False)]


def titled(title: str, found: Iterable[Sequence[str]], limit: int) -> list[str]:
    """Return a blank line, a title with the count, and the lines of the first `limit` entries; [] without an entry."""
    blocks = list(found)
    if not blocks:
        return []
    return ["", f"{title}: {len(blocks)}", *first_of(blocks, limit)]


def first_of(blocks: Sequence[Sequence[str]], limit: int, indent: str = "  ") -> list[str]:
    """Return the lines of the first `limit` entries, each a name and its details, and the number of further entries."""
    lines = [f"{indent}{'' if n == 0 else '  '}{line}" for block in blocks[:limit] for n, line in enumerate(block)]
    return lines + ([f"{indent}and {len(blocks) - limit} more: --limit"] if len(blocks) > limit else [])
