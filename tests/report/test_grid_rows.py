"""Rows and columns of the grid."""

from __future__ import annotations

import pytest

from farm.report.html.texts import cells_markup
from farm.report.model.grid import events_of, may_be_flaky, nightly_runs_of, rows_of, standing_of
from farm.report.model.status import Standing
from farm.results.analysis.flakiness import Record, Reliability
from farm.store.queries.grid import GridJob, NightlyCell, NightlyRun


def job(case: str, cells: str) -> GridJob:
    return GridJob(f"s/{case}[x]", "s", case, "SM8650", "htp", "8a8w", cells)


@pytest.mark.parametrize(
    ("cells", "standing"),
    [
        ("fppp", Standing.NEW_FAILURE), ("f", Standing.NEW_FAILURE), ("fkp", Standing.NEW_FAILURE),
        ("fff", Standing.STILL_FAILING), ("f·isf", Standing.STILL_FAILING), ("·fp", Standing.NEW_FAILURE),
        ("pf", Standing.FIXED), ("pif", Standing.FIXED), ("pk", Standing.FIXED), ("pp", Standing.PASSED),
        ("kf", Standing.KNOWN), ("iff", Standing.INFRA), ("nf", Standing.NOT_TESTED), ("sp", Standing.NOT_TESTED),
        ("··", Standing.NOT_TESTED),
    ],
)  # fmt: skip
def test_the_newest_result_and_the_verdict_before_it_make_the_state(cells: str, standing: Standing) -> None:
    assert standing_of(cells) is standing


def test_the_most_urgent_rows_come_first_and_flaky_ones_before_others() -> None:
    flaky = Record(3, 5, 0.1, 0.9, Reliability.FLAKY)
    steady = Record(5, 5, 0.5, 1.0, Reliability.STEADY)
    jobs = [job("a", "pp"), job("b", "ff"), job("c", "fp"), job("d", "pp"), job("e", "ip")]
    rows = rows_of(jobs, {"s/d[x]": flaky, "s/a[x]": steady})
    assert [row.case for row in rows] == ["c", "b", "e", "d", "a"]
    assert [row.flaky for row in rows] == [None, None, None, flaky, None]
    assert [may_be_flaky(one) for one in jobs] == [False, False, True, False, False]


def test_a_night_has_counts_new_failures_and_changed_tools() -> None:
    def nightly_run(name: str, qnn: str, ended: int | None = 9) -> NightlyRun:
        run = NightlyCell(f"{name}-run", name, "hardware", 5, ended, 0, "f")
        return NightlyRun(name, (run,), {"qnn": qnn, "commit": name})

    jobs = [job("a", "fp"), job("b", "ff"), job("c", "·k")]
    newest, older = nightly_runs_of([nightly_run("n2", "2.51", None), nightly_run("n1", "2.50")], jobs)
    assert (newest.counts, newest.new, newest.events, newest.finished_ms) == ({"f": 2}, 1, ["qnn 2.50 -> 2.51"], None)
    assert (older.counts, older.new, older.events, older.finished_ms) == ({"f": 1, "k": 1, "p": 1}, 1, [], 9)
    assert events_of({"a": "1"}, {"a": "1"}) == []


def test_cells_are_one_element_for_equal_neighbours() -> None:
    assert cells_markup("ppfk") == "<i class=passed>●●</i><i class=failed>✗</i><i class=known>◇</i>"
    assert cells_markup("") == ""
