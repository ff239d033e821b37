"""Records of nightly runs: exit codes, files and texts."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from farm.base.errors import InfraError, UsageError
from farm.dispatch.nightly.record import (
    CellResult,
    Findings,
    JobNote,
    NightlyRuns,
    cell_code,
    has_changed,
    new_id,
    nightly_code,
    write_whole,
)
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


def test_only_an_unfinished_nightly_run_with_the_same_runs_is_resumed(tmp_path: Path) -> None:
    nightly_runs = NightlyRuns(tmp_path / "n")
    nightly_runs.folder.mkdir()
    with pytest.raises(UsageError, match="there is none yet called 'n'"):
        nightly_runs.unfinished("d")
    killed = msgspec.structs.replace(SAMPLE, code=None, digest="d", finished_ms=None)
    nightly_runs.save(killed)
    assert nightly_runs.unfinished("d") == killed
    with pytest.raises(UsageError, match="the file has changed since"):
        nightly_runs.unfinished("e")
    nightly_runs.save(msgspec.structs.replace(killed, code=130))
    assert nightly_runs.unfinished("d").code == 130
    nightly_runs.save(msgspec.structs.replace(killed, code=1))
    with pytest.raises(UsageError, match="is finished"):
        nightly_runs.unfinished("d")


def test_old_nightly_runs_and_their_pages_are_removed_and_nothing_else(tmp_path: Path) -> None:
    nightly_runs, reports = NightlyRuns(tmp_path / "n"), tmp_path / "reports"
    ids = [f"2026030{day}-020000-00000{day}" for day in range(1, 6)]
    for number, one in enumerate(ids):
        write_whole(reports / one / "index.html", b"")
        nightly_runs.save(msgspec.structs.replace(SAMPLE, id=one, started_ms=number))
    (reports / "mine").mkdir()
    nightly_runs.forget(2, reports)
    assert [nightly_run.id for nightly_run in nightly_runs.all()] == ids[3:]
    assert sorted(path.name for path in reports.iterdir()) == [*ids[3:], "mine"]
    (nightly_runs.folder / f"{new_id()}.json").write_text("half of a ni")
    assert len(nightly_runs.all()) == 2


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "lock").symlink_to("/dev/full")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InfraError, match="cannot write .*File exists"):
        write_whole(blocked / "x.json", b"{}")
    with pytest.raises(InfraError, match="cannot write .*/n: "), NightlyRuns(tmp_path / "n").alone():
        pass
