"""Charts, trends, tables of a history and drift, from plain values."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from report_pages import FACTS as TREND_FACTS
from report_pages import alert, series

from farm.devices.device import HealthEvent
from farm.report.html.templates import plot_json, with_links
from farm.report.model.chart import (
    TREND_HEIGHT,
    Chart,
    ChartPoint,
    Plot,
    Trends,
    chart,
    distributions,
    health_check_plots,
    plots_of,
)
from farm.report.model.history import drift_of, tables
from farm.report.terminal.status import sparkline
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.queries.browse import DeviceAttempt
from farm.store.records import AlertRecord, Background, HistoryPoint, RunView, TrendSeries

FACTS = {"f": {"qnn": "2.50", "commit": "a"}, "g": {"qnn": "2.51", "commit": "b"}}


def point(run: int, value: float | None = 1e6, **changes: Any) -> HistoryPoint:
    usual: dict[str, Any] = {
        "job_id": "s/c[x]", "run_id": f"r{run:02}", "time_ms": run, "fingerprint": "f", "case_version": "v",
        "device": "d1", "device_kind": "hardware", "verdict": "passed", "known_issue": "", "metric": "latency",
        "unit": "ns", "direction": "lower", "exact": False, "value": value, "n": 3,
    }  # fmt: skip
    return HistoryPoint(**{**usual, **changes})


def test_jobs_of_one_metric_share_a_plot_in_the_unit_of_its_axis() -> None:
    points = [point(1), point(2, None), point(3, 2e6, commit="abc"), point(1, job_id="s/c[y]"),
              point(1, 30.0, metric="sqnr_fp32[0]", unit="dB", direction="higher")]  # fmt: skip
    plots = plots_of(points, FACTS, metrics=("sqnr_fp32[0]",))
    assert [(one.metric, one.unit, one.better) for one in plots] == [
        ("sqnr_fp32[0]", "dB", "higher"), ("latency", "ms", "lower"),
    ]  # fmt: skip
    first, second = plots[1].series
    assert [(one.value, one.n, one.commit) for one in first.points] == [(1.0, 3, ""), (2.0, 3, "abc")]
    assert (second.job_id, len(second.points)) == ("s/c[y]", 1)
    assert plots[1].text == "latency in ms of 2 series with 3 values; the table below has the numbers"
    assert plots_of([point(1, None), point(2, float("nan"))], FACTS) == []


def test_levels_are_medians_between_changes_and_local_runs_have_none() -> None:
    values = [1.0, 1.01, 0.99, 1.0, 1.0, 1.01, 1.3, 1.31, 1.3, 1.29, 1.3, 1.3]
    points = [point(n, 1e6 * value) for n, value in enumerate(values)]
    [plot] = plots_of([*points, point(20, 9e6, local=True)], FACTS)
    levels = plot.series[0].levels
    assert [(one.from_ms, one.to_ms) for one in levels] == [(0, 5), (6, 11)]
    assert [one.value for one in levels] == pytest.approx([1.0, 1.3], rel=0.01)
    assert [one.local for one in plot.series[0].points].count(True) == 1
    assert plots_of(points[:6], FACTS)[0].series[0].levels == []


def test_events_are_tools_firmware_and_new_devices_but_no_commits() -> None:
    build = {"fingerprint": "g", "device_facts": {"device_build": "14.2"}}
    points = [
        point(1), point(2, fingerprint="g"), point(3, fingerprint="g", device="d2"), point(4, fingerprint="g"),
        point(5, **build), point(6, case_version="w", **build),
    ]  # fmt: skip
    [plot] = plots_of(points, FACTS)
    assert [(one.time_ms, one.kind, one.text) for one in plot.events] == [
        (2, "SDK", "qnn 2.50 -> 2.51"),
        (3, "device", "first run on d2"),
        (5, "firmware", "device build 14.2"),
        (6, "case", "another test under the same name"),
    ]


def test_an_alert_is_at_its_first_bad_run(example_run: RunView) -> None:
    def on(**changes: Any) -> AlertRecord:
        return alert(example_run, "s/c[x]", **{"device_kind": "hardware", "first_bad": "r02", **changes})

    [plot] = plots_of([point(1), point(2, 2e6)], FACTS, [on(id=7), on(metric="pte_size"), on(first_bad="gone")])
    assert [(one.id, one.run_id, one.time_ms) for one in plot.alerts] == [(7, "r02", 2)]
    assert plot.alerts[0].text.startswith("latency slower: +11")


def test_health_checks_are_a_plot_when_there_are_two() -> None:
    def check(time_ms: int, *samples: float, event: str = "check_passed") -> HealthEvent:
        return HealthEvent("d", event, "healthy", "cable" if event == "infra" else "", {}, samples, time_ms)

    assert health_check_plots([check(1, 1e6)]) == []
    [plot] = health_check_plots([check(3, 2e6, event="check_failed"), check(2, event="infra"), check(1, 1e6)])
    assert [(one.value, one.failed) for one in plot.series[0].points] == [(1.0, False), (2.0, True)]
    assert [one.text for one in plot.events] == ["infra: cable", "check_failed"]


def test_a_plot_is_safe_in_a_script_element() -> None:
    [plot] = plots_of([point(1, device="</script><script>x", job_id="<!--")], FACTS)
    text = plot_json(plot)
    assert "<" not in text
    assert msgspec.json.decode(text.encode(), type=Plot) == plot


def test_addresses_and_issues_in_a_text_are_links() -> None:
    link = '<a href="https://x.org/a?b=1" rel="noreferrer">https://x.org/a?b=1</a>'
    text = with_links("see #12, https://x.org/a?b=1. <b> javascript:alert(1) #0")
    assert text == f"see #12, {link}. &lt;b&gt; javascript:alert(1) #0"
    linked = with_links("#12", "https://github.com/o/r/commit/{commit}")
    assert linked == '<a href="https://github.com/o/r/issues/12" rel="noreferrer">#12</a>'
    assert with_links("#12", "javascript:{commit}") == "#12"


def drawn(*values: float) -> Chart | None:
    points = [ChartPoint(place, value, f"run{place}") for place, value in enumerate(values)]
    return chart("latency", points, "C", ("0 s", "9 s"), from_zero=False)


def test_a_line_goes_from_least_to_greatest_within_the_box_without_values_that_are_not_finite() -> None:
    made = drawn(1.0, math.nan, 3.0, 2.0)
    assert made is not None
    assert made.line == "8.0,112.0 424.0,8.0 632.0,60.0"
    assert made.description == "latency, 3 values: from 1.0 C to 2.0 C, least 1.0 C, most 3.0 C"
    assert made.marks[1].title == "run2: 3.0 C"


def test_a_series_is_a_line_of_blocks() -> None:
    for values, line in (
        ((), ""), ((1, 2, 3, 4, 5, 6, 7, 8), "▁▂▃▄▅▆▇█"), ((5, 5, 5), "▄▄▄"), ((1, None, 2, math.nan), "▁ █ "),
        ((40, math.inf, 30, -math.inf), "█▲▁▼"), ((math.inf, math.inf), "▲▲"), ((-1.7e308, 1.7e308), "▁█"),
    ):  # fmt: skip
        assert sparkline(values) == line


def test_a_table_has_a_row_an_attempt_and_says_what_is_new() -> None:
    other = {"fingerprint": "g", "case_version": "w"}
    points = [point(1), point(2, 2e6, fingerprint="g"), point(2, metric="load_time", fingerprint="g"),
              point(3, 2e6, **other), point(4, None, metric="", **other)]  # fmt: skip
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


FLAT = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 100.2]


def background(*found: TrendSeries) -> Background:
    return Background({"j": found}, TREND_FACTS)


def test_a_step_is_marked_and_told_with_its_day_and_its_direction(example_run: RunView) -> None:
    slower = series(example_run, "latency", "ns", "lower", *FLAT, *[value * 1.2 for value in FLAT])
    (one,) = Trends(background(slower)).of_job("j", "hardware")
    assert (one.stepped, one.tone, one.runs) == (True, "worse", 24)
    assert one.change == "+20.0 % since 2025-12-21"
    assert one.steps == f"M37 0v{TREND_HEIGHT}"
    assert one.toolchain == ("2025-12-21: executorch 1.5.0 -> 1.5.1",)
    assert one.changes[0].endswith("+20.0 %")
    better = msgspec.structs.replace(slower, direction="higher")
    assert Trends(background(better)).of_job("j", "hardware")[0].tone == "better"


def test_noise_has_no_step_and_says_how_far_the_last_value_is_off(example_run: RunView) -> None:
    (one,) = Trends(background(series(example_run, "latency", "ns", "lower", *FLAT, 102.0))).of_job("j", "hardware")
    assert (one.stepped, one.tone, one.steps) == (False, "", "")
    assert one.change == "+2.0 %"
    same = series(example_run, "latency", "ns", "lower", *[5.0] * 9)
    assert Trends(background(same)).of_job("j", "hardware")[0].change == "same"


def test_virtual_devices_have_no_trend_of_times(example_run: RunView) -> None:
    found = background(
        series(example_run, "latency", "ns", "lower", *FLAT),
        series(example_run, "htp_cycles", "cycles", "lower", *FLAT),
        series(example_run, "sqnr_fp32[0]", "dB", "higher", *FLAT),
    )
    assert [one.name for one in Trends(found).of_job("j", "virtual")] == ["SQNR"]
    assert [one.name for one in Trends(found).of_job("j", "hardware")] == ["latency", "SQNR"]
    assert Trends(found).of_job("other", "virtual") == ()


def test_numbers_of_another_version_of_the_case_are_left_out(example_run: RunView) -> None:
    old = series(example_run, "latency", "ns", "lower", *FLAT)
    points = [msgspec.structs.replace(point, case="0" if n < 9 else "1") for n, point in enumerate(old.points)]
    changed = msgspec.structs.replace(old, points=tuple(points))
    assert Trends(background(changed)).of_job("j", "hardware")[0].runs == 3
    alone = msgspec.structs.replace(old, points=tuple(points[:9]) + tuple(points[-1:]))
    assert Trends(background(alone)).of_job("j", "hardware") == ()


def test_a_line_has_gaps_and_edges(example_run: RunView) -> None:
    for values, line in (
        ((1.0, 3.0), "M1 29L4 1"), ((2.0, 2.0), "M1 15L4 15"), ((1.0, None, 3.0), "M1 29M7 1"),
        ((1.0, math.inf, 3.0, -math.inf), "M1 29L4 0L7 1L10 30"), ((-1e308, 1e308), "M1 29L4 1"),
        ((None, None), None), ((math.inf, math.inf), None),
    ):  # fmt: skip
        found = Trends(background(series(example_run, "latency", "ns", "lower", *values))).of_job("j", "hardware")
        assert [one.line for one in found] == ([] if line is None else [line])


def test_few_samples_are_lines_many_are_bars_and_dull_ones_nothing() -> None:
    def bars(*samples: float) -> list[bool]:
        measured = Measurement("latency", "ns", Direction.LOWER, samples)
        attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", measurements=(measured,))
        return [one.bars for one in distributions(attempt)]

    assert bars(3e6, 1e6, 2e6) == [False]
    assert bars(*[1.0] * 30, 2.0, 3.0) == [True]
    assert bars(-1e308, 0, 1e308) == [False]
    for dull in ((1.0, 2.0), (1.0, 1.0, 1.0), (1.0, 2.0, math.inf), (math.nan,) * 5):
        assert bars(*dull) == []
