"""Plots, tables of a history and drift, from plain values."""

from __future__ import annotations

import math

import pytest

from farm.devices.health import HealthEvent
from farm.report.model.chart import HEIGHT, WIDTH, ChartPoint, chart
from farm.report.model.drift import drift_of
from farm.report.model.history import tables
from farm.store.queries.browse import DeviceAttempt
from farm.store.records import HistoryPoint


def plot(*values: float, broken: int = -1) -> object:
    points = [ChartPoint(place, value, f"run{place}", broken=place == broken) for place, value in enumerate(values)]
    return chart("latency", points, lambda value: f"{value:g} ms")


def test_a_line_goes_from_least_to_greatest_within_the_box() -> None:
    made = plot(1.0, 3.0, 2.0)
    assert made.lines == ("8.0,112.0 320.0,8.0 632.0,60.0",)  # type: ignore[attr-defined]
    assert made.description == "latency, 3 values: from 1 ms to 2 ms, least 1 ms, most 3 ms"  # type: ignore[attr-defined]
    assert [mark.title for mark in made.marks][1] == "run1: 3 ms"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "values", [(), (1.0,), (math.nan,) * 3, (math.inf, -math.inf), (1e308, -1e308), (0.0, 0.0), (5e-324, 1e-323)]
)
def test_whatever_the_values_all_of_it_is_in_the_box(values: tuple[float, ...]) -> None:
    made = plot(*values)
    for mark in made.marks:  # type: ignore[attr-defined]
        assert 0 <= float(mark.x) <= WIDTH
        assert 0 <= float(mark.y) <= HEIGHT
    assert "nan" not in "".join(made.lines)  # type: ignore[attr-defined]


def test_the_line_has_a_gap_where_something_else_began_and_where_there_is_no_value() -> None:
    assert len(plot(1.0, 2.0, 3.0, 4.0, broken=2).lines) == 2  # type: ignore[attr-defined]
    assert len(plot(1.0, 2.0, math.nan, 3.0, 4.0).lines) == 2  # type: ignore[attr-defined]


def point(run: int, metric: str, value: float | None, fingerprint: str = "f", version: str = "v") -> HistoryPoint:
    return HistoryPoint(
        "s/c[x]", f"r{run}", run, fingerprint, version, "d", "virtual", "passed", "", metric, "ns", "lower",
        exact=False, value=value, n=3,
    )  # fmt: skip


def test_a_table_has_a_row_an_attempt_and_says_what_is_new() -> None:
    points = [point(1, "latency", 1e6), point(2, "latency", 2e6, "g"), point(2, "load_time", 1e6, "g"),
              point(3, "latency", 2e6, "g", "w"), point(4, "", None, "g", "w")]  # fmt: skip
    (table,) = tables(points, ["latency"], {"f": {"qnn": "1"}, "g": {"qnn": "2"}})
    assert [row.change for row in table.rows] == ["", "qnn 1 -> 2", "another test under the same name", ""]
    assert (table.metrics, table.units, table.others) == (("latency",), ("ms",), ("load_time",))
    assert [row.figures[0] and row.figures[0].value for row in table.rows] == [1e6, 2e6, 2e6, None]


def ran(latency_ns: float | None, fingerprint: str = "f", verdict: str = "passed", job: str = "j") -> DeviceAttempt:
    return DeviceAttempt(
        run_id="r", job_id=job, verdict=verdict, known_issue="", stage="done", cause="", reason="", recorded_ms=0,
        seconds=1.0, fingerprint=fingerprint, case_version="v", latency_ns=latency_ns,
    )  # fmt: skip


def health_check(*samples: float) -> HealthEvent:
    return HealthEvent("d", "check_passed", "healthy", "", {}, samples, 1)


def test_drift_compares_the_newest_with_the_median_before() -> None:
    drift = drift_of(
        [health_check(12.0), health_check(), health_check(10.0, 11.0), health_check(10.0), health_check(9.0)], []
    )
    assert (drift.health_check_ratio, drift.health_checks) == (1.2, 4)
    few = drift_of([health_check(12.0), health_check(10.0), health_check(math.nan)], [])
    assert (few.health_check_ratio, few.health_checks) == (None, 2)


def test_drift_of_jobs_is_of_one_toolchain_and_of_what_passed() -> None:
    here = [ran(3.0), ran(99.0, verdict="failed"), ran(None), ran(2.0), ran(2.0), ran(2.0), ran(50.0, "older")]
    drift = drift_of([], here)
    assert (drift.jobs_ratio, drift.jobs) == (1.5, 1)
    assert drift_of([], [ran(1.0, "newer"), *here]).jobs_ratio is None
    assert drift_of([], [*here, *(ran(1.0, job="k") for _ in range(4))]).jobs == 2
    assert drift_of([], [ran(0.0)] * 9).jobs_ratio is None
