from __future__ import annotations

import math

import msgspec
import pytest
from report_context import FACTS, series

from farm.report.model.chart import SPREAD_WIDTH, distributions
from farm.report.model.trends import HEIGHT, trends_of
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.records import Background, TrendSeries
from farm.store.view import RunView

FLAT = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 100.2]


def background(*found: TrendSeries) -> Background:
    return Background({"j": found}, FACTS)


def test_a_step_is_marked_and_told_with_its_day_and_its_direction(example_run: RunView) -> None:
    slower = series(example_run, "latency", "ns", "lower", *FLAT, *[value * 1.2 for value in FLAT])
    (one,) = trends_of(background(slower), "j", "hardware")
    assert (one.stepped, one.tone, one.runs) == (True, "worse", 24)
    assert one.change == "+20.0 % since 2025-12-21"
    assert one.steps == f"M37 0v{HEIGHT}"
    assert one.toolchain == ("2025-12-21: executorch 1.5.0 -> 1.5.1",)
    assert one.changes[0].endswith("+20.0 %")
    better = msgspec.structs.replace(slower, direction="higher")
    assert trends_of(background(better), "j", "hardware")[0].tone == "better"


def test_noise_has_no_step_and_says_how_far_the_last_value_is_off(example_run: RunView) -> None:
    (one,) = trends_of(background(series(example_run, "latency", "ns", "lower", *FLAT, 102.0)), "j", "hardware")
    assert (one.stepped, one.tone, one.steps) == (False, "", "")
    assert one.change == "+2.0 %"
    same = series(example_run, "latency", "ns", "lower", *[5.0] * 9)
    assert trends_of(background(same), "j", "hardware")[0].change == "same"


def test_virtual_devices_have_no_trend_of_times(example_run: RunView) -> None:
    found = background(
        series(example_run, "latency", "ns", "lower", *FLAT),
        series(example_run, "htp_cycles", "cycles", "lower", *FLAT),
        series(example_run, "sqnr_fp32[0]", "dB", "higher", *FLAT),
    )
    assert [one.name for one in trends_of(found, "j", "virtual")] == ["SQNR"]
    assert [one.name for one in trends_of(found, "j", "hardware")] == ["latency", "SQNR"]
    assert trends_of(found, "other", "virtual") == ()


def test_numbers_of_another_version_of_the_case_are_left_out(example_run: RunView) -> None:
    old = series(example_run, "latency", "ns", "lower", *FLAT)
    points = [msgspec.structs.replace(point, case="0" if n < 9 else "1") for n, point in enumerate(old.points)]
    changed = msgspec.structs.replace(old, points=tuple(points))
    assert trends_of(background(changed), "j", "hardware")[0].runs == 3
    alone = msgspec.structs.replace(old, points=tuple(points[:9]) + tuple(points[-1:]))
    assert trends_of(background(alone), "j", "hardware") == ()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((1.0, 3.0), "M1 29L4 1"),
        ((2.0, 2.0), "M1 15L4 15"),
        ((1.0, None, 3.0), "M1 29M7 1"),
        ((1.0, math.inf, 3.0, -math.inf), "M1 29L4 0L7 1L10 30"),
        ((-1e308, 1e308), "M1 29L4 1"),
        ((None, None), None),
        ((math.inf, math.inf), None),
    ],
)
def test_a_line_has_gaps_and_edges(example_run: RunView, values: tuple[float | None, ...], line: str | None) -> None:
    found = trends_of(background(series(example_run, "latency", "ns", "lower", *values)), "j", "hardware")
    assert [one.line for one in found] == ([] if line is None else [line])


def test_few_samples_are_lines_and_many_are_bars() -> None:
    def attempt(*samples: float, unit: str = "ns") -> Attempt:
        measured = Measurement("latency", unit, Direction.LOWER, samples)
        return Attempt("j", Verdict.PASSED, Stage.DONE, "", measurements=(measured,))

    (few,) = distributions(attempt(3e6, 1e6, 2e6))
    assert (few.bars, few.p50, few.p90) == (False, "150", "300")
    assert few.shape.count("M") == 3
    (many,) = distributions(attempt(*[1.0] * 30, 2.0, 3.0))
    assert many.bars
    assert "v-36" in many.shape
    assert few.spread.n == 3
    assert float(many.p90) <= SPREAD_WIDTH
    for dull in ((1.0, 2.0), (1.0, 1.0, 1.0), (1.0, 2.0, math.inf), (math.nan,) * 5):
        assert distributions(attempt(*dull)) == ()
    assert distributions(attempt(1, 2, 3, unit="bytes")) == ()
    assert distributions(attempt(-1e308, 0, 1e308))[0].p50 == "150"
