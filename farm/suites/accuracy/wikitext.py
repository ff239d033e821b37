"""Pages of wikitext as data sets have them, with marks and spaces of their own -> text as people write it.

lm-eval scores a page without them, and counts its words with them (its task `wikitext`, version 2).
"""

from __future__ import annotations

import re

_NUMBER_MARKS = "-,."
_PUNCTUATION = ":;.!?,"
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_HEADINGS = (4, 3, 2)
_SPACED = ((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))


def detokenized(page: str) -> str:
    """Return `page` as lm-eval scores it: each rule over all of the page, in its order. Pure."""
    text = page.replace("s '", "s'")
    for mark in _NUMBER_MARKS:
        text = text.replace(f" @{mark}@ ", mark)
    for mark in _PUNCTUATION:
        text = text.replace(f" {mark} ", f"{mark} ")
    for begin, end in _PAIRS:
        inside = rf"{re.escape(begin)}\s*([^{re.escape(end)}]*?)\s*{re.escape(end)}"
        text = re.sub(inside, rf"{begin}\1{end}", text)
    for length in _HEADINGS:
        text = text.replace(" ".join("=" * length), "=" * length)
    for spaced, written in _SPACED:
        text = text.replace(spaced, written)
    return text
