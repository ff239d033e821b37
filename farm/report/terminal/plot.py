"""A series as one line of blocks in a terminal. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = " "
_BEYOND = {True: "▲", False: "▼"}


def sparkline(values: Sequence[float | None]) -> str:
    """Return one block a value, by where it lies between the least and the greatest.

    None and NaN are a gap, what is infinite is an arrow.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, least, most) for value in values)


def _block(value: float | None, least: float, most: float) -> str:
    if value is None or math.isnan(value):
        return _GAP
    if math.isinf(value):
        return _BEYOND[value > 0]
    if least == most:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    # Halved first: the difference of two great numbers may be infinite.
    share = (value / 2 - least / 2) / (most / 2 - least / 2)
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]
