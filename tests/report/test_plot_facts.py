"""Facts of charts: series with levels, events and alerts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farm.devices.health import HealthEvent
from farm.report.html.texts import plot_json, with_links
from farm.report.model.plot import Plot, health_check_plots, plots_of
from farm.store.records import AlertRecord, HistoryPoint

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
    points = [
        point(1),
        point(2, fingerprint="g"),
        point(3, fingerprint="g", device="d2"),
        point(4, fingerprint="g"),
        point(5, fingerprint="g", device_facts={"device_build": "14.2"}),
        point(6, fingerprint="g", device_facts={"device_build": "14.2"}, case_version="w"),
    ]
    [plot] = plots_of(points, FACTS)
    assert [(one.time_ms, one.kind, one.text) for one in plot.events] == [
        (2, "SDK", "qnn 2.50 -> 2.51"),
        (3, "device", "first run on d2"),
        (5, "firmware", "device build 14.2"),
        (6, "case", "another test under the same name"),
    ]


def test_an_alert_is_at_its_first_bad_run() -> None:
    def alert(**changes: Any) -> AlertRecord:
        usual: dict[str, Any] = {
            "id": 7, "series_id": 1, "job_id": "s/c[x]", "metric": "latency", "unit": "ns", "direction": "lower",
            "exact": False, "device_kind": "hardware", "run_id": "r02", "finding": "regression", "state": "confirmed",
            "last_good": "r01", "first_bad": "r02", "change": 0.2, "low": 0.2, "high": 0.2, "p_value": 0.0,
            "reason": "", "likely_cause": "", "device": "", "found_ms": 0,
        }  # fmt: skip
        return AlertRecord(**{**usual, **changes})

    [plot] = plots_of([point(1), point(2, 2e6)], FACTS, [alert(), alert(metric="pte_size"), alert(first_bad="gone")])
    assert [(one.id, one.run_id, one.time_ms) for one in plot.alerts] == [(7, "r02", 2)]
    assert plot.alerts[0].text.startswith("latency slower: +22")


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
    text = "see #12, https://x.org/a?b=1. <b> javascript:alert(1) #0"
    assert with_links(text) == (
        'see #12, <a href="https://x.org/a?b=1" rel="noreferrer">https://x.org/a?b=1</a>. &lt;b&gt; '
        "javascript:alert(1) #0"
    )
    linked = with_links("#12", "https://github.com/o/r/commit/{commit}")
    assert linked == '<a href="https://github.com/o/r/issues/12" rel="noreferrer">#12</a>'
    assert with_links("#12", "javascript:{commit}") == "#12"
