"""Markup that templates cannot make well: texts with links, cells of the grid, and facts for scripts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from markupsafe import Markup, escape

from farm.base.text import visible
from farm.report.model.commits import commit_link
from farm.store.values import jsonable

if TYPE_CHECKING:
    from farm.report.model.plot import Plot

_LINK = re.compile(r"https?://[^\s<>\"']+[^\s<>\"'.,;:!?)]|#[1-9]\d{0,8}\b")
_HASH = "0" * 40
_COMMIT = f"/commit/{_HASH}"
LETTERS = {
    "p": ("passed", "●", "passed"),
    "f": ("failed", "✗", "failed"),
    "k": ("known", "◇", "known issue"),
    "i": ("infra", "△", "infra"),
    "s": ("skipped", "○", "skipped"),
    "n": ("not_run", "·", "not run"),
    "\N{MIDDLE DOT}": ("nothing", "\N{NO-BREAK SPACE}", "no result"),
}
"""Class, shape and words of each letter of `farm.store.queries.grid.CELLS`."""

_EQUAL = re.compile(r"(.)\1*")


def with_links(text: str, commit_url: str = "") -> Markup:
    """Return a text whose web addresses are links; `#123` links to the issue at the host of a toolchain's commits.

    Text and address are untrusted.
    """
    base = commit_link(commit_url, _HASH)
    issues = f"{base.removesuffix(_COMMIT)}/issues/" if base.endswith(_COMMIT) else ""
    parts, end = [], 0
    for found in _LINK.finditer(text):
        address = found[0] if not found[0].startswith("#") else f"{issues}{found[0][1:]}" if issues else ""
        parts.append(escape(visible(text[end : found.start()])))
        link = Markup('<a href="{}" rel="noreferrer">{}</a>')
        parts.append(link.format(address, found[0]) if address else escape(found[0]))
        end = found.end()
    return Markup("").join([*parts, escape(visible(text[end:]))])


def plot_json(plot: Plot) -> Markup:
    """Return a plot as JSON that is safe inside of a script element."""
    text = msgspec.json.encode(jsonable(msgspec.to_builtins(plot))).decode()
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 - no tag can begin or end in it


def cells_markup(cells: str) -> Markup:
    """Return the cells of a row with a class for each run of equal letters."""
    parts = (f"<i class={LETTERS[run[1]][0]}>{LETTERS[run[1]][1] * len(run[0])}</i>" for run in _EQUAL.finditer(cells))
    return Markup("".join(parts))  # noqa: S704 - made of constants


def letter_markup(letter: str) -> Markup:
    """Return one letter as a shape with its words."""
    name, shape, words = LETTERS[letter]
    return Markup(f'<span class="v {name}">{shape}</span> {words}')  # noqa: S704 - made of constants
