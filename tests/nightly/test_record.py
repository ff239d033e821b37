from __future__ import annotations

import itertools

import msgspec
import pytest

from farm.dispatch.nightly.check import CellForecast, matrix_lines
from farm.dispatch.nightly.record import CellResult, Findings, JobNote, cell_code, has_changed, nightly_code
from farm.dispatch.nightly.render import nightly_lines
from farm.dispatch.nightly.templates import SAMPLE

CELL = CellResult(name="c", socs=("SM8650",), suites=("smoke",), backend="htp", virtual=False)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 5], 5),
        ([0, 4, 5], 4),
        ([0, 3, 4], 3),
        ([0, 1, 3, 4, 5], 1),
        ([None, 0], 0),
        ([None, None], 5),
    ],
)
def test_the_worst_cell_decides_whatever_the_order(codes: list[int | None], code: int) -> None:
    for order in itertools.permutations(codes):
        cells = tuple(msgspec.structs.replace(CELL, code=one) for one in order)
        assert nightly_code(cells, interrupted=False) == code
        assert nightly_code(cells, interrupted=True) == 130


def test_regressions_are_found_where_nothing_failed() -> None:
    found = Findings((JobNote("j", "slower"),))
    assert [cell_code(code, found) for code in (0, 1, 2, 4, 130)] == [3, 1, 3, 3, 130]
    assert [cell_code(code, Findings()) for code in (0, 1, 2, 4, 5)] == [0, 1, 4, 4, 5]


def test_a_nightly_run_has_changed_when_something_else_is_wrong() -> None:
    good = msgspec.structs.replace(SAMPLE, code=0, cells=())
    other = msgspec.structs.replace(
        SAMPLE, cells=(msgspec.structs.replace(SAMPLE.cells[0], new_failures=(JobNote("smoke/else", ""),)),)
    )
    new_yesterday = msgspec.structs.replace(
        SAMPLE.cells[0],
        new_failures=(),
        still_failing=(*SAMPLE.cells[0].new_failures, *SAMPLE.cells[0].still_failing),
    )
    still = msgspec.structs.replace(SAMPLE, cells=(new_yesterday, *SAMPLE.cells[1:]))
    assert has_changed(SAMPLE, None)
    assert not has_changed(good, None)
    assert has_changed(SAMPLE, good)
    assert has_changed(good, SAMPLE)
    assert has_changed(other, SAMPLE)
    assert not has_changed(still, SAMPLE), "what failed yesterday fails today"


def test_the_summary_is_as_wide_as_the_terminal_and_no_line_is_a_command_of_github() -> None:
    hostile = JobNote("smoke/" + "x" * 200, "::add-mask::\x1b[31m" + "y" * 500 + "\n::error::z")
    cell = msgspec.structs.replace(
        SAMPLE.cells[0], name="n" * 80, new_failures=(hostile,) * 12, infra=(hostile,), problem="::error:: " * 30
    )
    lines = nightly_lines(msgspec.structs.replace(SAMPLE, cells=(cell,)), 80)
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert not any(line.lstrip().startswith("::") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "  and 2 more: the report has them" in lines


def test_the_matrix_says_how_long_and_what_is_missing() -> None:
    row = CellForecast(name="c", socs=("SM8650",), suites=("smoke",), backend="htp", jobs=8, virtual=0, expected_s=90.0,
              command="farm run", problem="no SDK")  # fmt: skip
    text = "\n".join(matrix_lines("n", [row, msgspec.structs.replace(row, virtual=2, expected_s=None)], 3600.0))
    assert "nightly run n: runs: 2, jobs: 16, within 1 h 00 min" in text
    assert "8 jobs on attached devices; about 1 min 30 s on one device a SoC" in text
    assert "8 jobs on virtual devices, 2 of each SoC; no past to tell how long" in text
    assert "CANNOT RUN HERE: no SDK" in text
