"""Parts of a page that are shown on demand, packed so that thousands of them are small. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_AT_ONCE = 64
"""So many are unpacked for one: few enough that nobody waits."""


def packed(numbers: Sequence[int], part: Callable[[int], str]) -> list[tuple[int, int, str]]:
    """Return packs of parts, each with the first and last number in it; `numbers` ascend.

    A pack is a JSON object of markup by number, in zlib's format and Base64, as browsers unpack it.
    """
    packs = []
    for start in range(0, len(numbers), _AT_ONCE):
        chosen = numbers[start : start + _AT_ONCE]
        text = json.dumps({str(number): part(number) for number in chosen}, ensure_ascii=False)
        data = base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()
        packs.append((chosen[0], chosen[-1], data))
    return packs
