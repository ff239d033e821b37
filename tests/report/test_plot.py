from __future__ import annotations

import math

import pytest

from farm.report.terminal.history import sparkline


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((), ""),
        ((1, 2, 3, 4, 5, 6, 7, 8), "▁▂▃▄▅▆▇█"),
        ((5, 5, 5), "▄▄▄"),
        ((1, None, 2, math.nan), "▁ █ "),
        ((40, math.inf, 30, -math.inf), "█▲▁▼"),
        ((math.inf, math.inf), "▲▲"),
        ((-1.7e308, 1.7e308), "▁█"),
    ],
)
def test_a_series_is_a_line_of_blocks(values: tuple[float | None, ...], line: str) -> None:
    assert sparkline(values) == line
