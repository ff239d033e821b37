"""Cells of a grid as markup: one text per row, which `reports/grid.js` turns into links when the row is seen."""

from __future__ import annotations

import re

from markupsafe import Markup

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

_RUN = re.compile(r"(.)\1*")


def cells_markup(cells: str) -> Markup:
    """Return the cells of a row with a class for each run of equal letters."""
    parts = (f"<i class={LETTERS[run[1]][0]}>{LETTERS[run[1]][1] * len(run[0])}</i>" for run in _RUN.finditer(cells))
    return Markup("".join(parts))  # noqa: S704 - made of constants


def letter_markup(letter: str) -> Markup:
    """Return one letter as a shape with its words."""
    name, shape, words = LETTERS[letter]
    return Markup(f'<span class="v {name}">{shape}</span> {words}')  # noqa: S704 - made of constants
