"""Suspected regressions: gates, directions, exact metrics, and values that are no numbers."""

from __future__ import annotations

import math
import warnings

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.results.analysis.scale import Scale, Series, change_text, scale_of, scaled, unscaled
from farm.results.analysis.suspected import SUSPECTED, Finding, judge, may_hide_regression
from farm.results.attempt import Direction

from .conftest import COSINE, DELEGATED, FALLBACK, LATENCY, PATIENT, SQNR, TOP1, noisy

EVERYTHING = st.floats(allow_nan=True, allow_infinity=True)


def test_a_run_that_is_a_tenth_slower_is_suspected() -> None:
    judged = judge(LATENCY, noisy(21), 1.1e6)
    assert judged.finding is Finding.REGRESSION
    assert math.exp(judged.change) == pytest.approx(1.1, rel=0.02)
    assert judged.baseline == pytest.approx(1e6, rel=0.02)
    assert judged.p_value < 0.01
    assert judged.reason.startswith("+")
    assert "against the median of 21 runs" in judged.reason


def test_a_run_that_is_a_tenth_faster_is_an_improvement() -> None:
    assert judge(LATENCY, noisy(21), 0.9e6).finding is Finding.IMPROVEMENT


def test_seven_runs_are_too_few_and_eight_are_enough() -> None:
    few = judge(LATENCY, noisy(7), 2e6)
    assert few.finding is Finding.INSUFFICIENT_DATA
    assert few.reason == "7 comparable runs, 8 are needed"
    assert judge(LATENCY, noisy(8), 2e6).finding is Finding.REGRESSION


def test_whether_bad_luck_can_hide_a_regression() -> None:
    def may(history: list[float], value: float) -> bool:
        return may_hide_regression(LATENCY, judge(LATENCY, history, value))

    calm, wild = noisy(21, noise=0.005), noisy(21, noise=0.05)
    assert may(wild, 1e6)
    assert not may(calm, 1e6)
    assert may(calm, 1.025e6)
    # A value this much better is no accident, even in a noisy series.
    assert not may(wild, 0.8e6)
    # Nothing is known yet, or nothing can be known, or neither way is worse.
    assert may(calm[:7], 1e6)
    assert not may(calm, math.nan)
    patient = msgspec.structs.replace(LATENCY, direction=Direction.NONE)
    assert not may_hide_regression(patient, judge(patient, wild, 1e6))
    rate = msgspec.structs.replace(LATENCY, direction=Direction.HIGHER)
    assert may_hide_regression(rate, judge(rate, calm, 0.975e6))
    assert not may_hide_regression(rate, judge(rate, calm, 1.025e6))


def test_only_the_last_21_runs_count() -> None:
    judged = judge(LATENCY, [*noisy(40, level=3e6), *noisy(21)], 1.1e6)
    assert judged.finding is Finding.REGRESSION
    assert judged.count == 21


def test_only_a_better_level_before_a_run_counts_alone() -> None:
    fallen = [*noisy(13, level=1.02e6, noise=0.0005), *noisy(8, noise=0.0005)]
    neither_way = msgspec.structs.replace(LATENCY, direction=Direction.NONE)
    assert [judge(series, fallen, 1e6).count for series in (LATENCY, neither_way)] == [4, 21]


def test_a_change_below_3_percent_is_none_however_calm_the_history() -> None:
    calm = noisy(21, noise=0.0001)
    assert judge(LATENCY, calm, 1.02e6).finding is Finding.UNCHANGED
    assert judge(LATENCY, calm, 1.04e6).finding is Finding.REGRESSION


def test_a_change_within_what_the_history_varies_by_is_none_below_3_5_percent() -> None:
    wild = noisy(21, noise=0.3)
    assert judge(LATENCY, wild, 1.034 * float(np.median(wild))).finding is Finding.UNCHANGED


def test_one_wild_night_in_the_history_hides_nothing() -> None:
    assert judge(LATENCY, [*noisy(20), 9e6], 1.1e6).finding is Finding.REGRESSION


def test_a_history_that_repeats_to_the_bit_alerts_from_the_first_gate_on() -> None:
    assert judge(LATENCY, [1e6] * 21, 1.02e6).finding is Finding.UNCHANGED
    judged = judge(LATENCY, [1e6] * 21, 1.05e6)
    assert judged.finding is Finding.REGRESSION
    assert judged.sigmas == math.inf
    assert judged.p_value == pytest.approx(1 / 22)
    assert judged.reason == "+5.0 % against the median of 21 runs, which repeat exactly"
    assert judge(LATENCY, [1e6] * 21, 1e6).finding is Finding.UNCHANGED


def test_a_drop_of_sqnr_is_a_regression_in_decibels() -> None:
    judged = judge(SQNR, [41.25] * 12, 40.5)
    assert judged.finding is Finding.REGRESSION
    assert judged.change == pytest.approx(-0.75)
    assert "-0.8 dB" in judged.reason
    # 1 % of the figure, and 12 % of the error's amplitude; the same ratio of a time would be none.
    assert judge(SQNR, [90.0] * 12, 89.0).finding is Finding.REGRESSION
    assert judge(SQNR, [41.25] * 12, 42.0).finding is Finding.IMPROVEMENT


def test_a_drop_of_cosine_counts_where_it_is_close_to_1() -> None:
    assert judge(COSINE, [0.9999] * 12, 0.9996).finding is Finding.REGRESSION
    assert judge(COSINE, [0.9999] * 12, 0.99995).finding is Finding.IMPROVEMENT
    assert judge(COSINE, [1.0 - 1e-15] * 12, 1.0 - 3e-15).finding is Finding.UNCHANGED, "rounding"
    assert judge(COSINE, [1.0] * 12, 1.0 + 2e-16).finding is Finding.UNCHANGED, "rounding"


def test_a_share_is_compared_by_its_difference() -> None:
    judged = judge(TOP1, [0.95] * 12, 0.93)
    assert judged.finding is Finding.REGRESSION
    assert judged.change == pytest.approx(-0.02)
    assert judge(TOP1, [0.0] * 12, 0.0).finding is Finding.UNCHANGED


def test_outputs_that_were_equal_and_are_not_any_more_are_a_regression() -> None:
    assert judge(SQNR, [math.inf] * 12, math.inf).finding is Finding.UNCHANGED
    judged = judge(SQNR, [math.inf] * 12, 140.0)
    assert judged.finding is Finding.REGRESSION
    assert judged.change == -math.inf
    assert judge(SQNR, [40.0] * 12, math.inf).finding is Finding.IMPROVEMENT
    assert judge(SQNR, [40.0] * 12, -math.inf).finding is Finding.REGRESSION


def test_a_history_between_finite_and_infinite_is_not_compared() -> None:
    judged = judge(SQNR, [40.0, math.inf] * 6, 40.0)
    assert judged.finding is Finding.UNDEFINED
    assert "finite and infinite" in judged.reason


def test_what_is_no_number_is_said_to_be_none() -> None:
    assert judge(LATENCY, noisy(21), math.nan).finding is Finding.UNDEFINED
    assert judge(LATENCY, noisy(21), -1.0).finding is Finding.UNDEFINED
    assert judge(FALLBACK, [0.0], math.nan).finding is Finding.UNDEFINED
    assert judge(LATENCY, [*noisy(7), math.nan, math.nan], 1e6).finding is Finding.INSUFFICIENT_DATA
    assert judge(LATENCY, [0.0] * 9, 0.0).finding is Finding.UNCHANGED
    assert judge(LATENCY, [0.0] * 9, 5.0).finding is Finding.REGRESSION


@pytest.mark.parametrize(
    ("series", "before", "now", "finding", "reason"),
    [
        (FALLBACK, [0, 0], 1, Finding.REGRESSION, "0 -> 1 count"),
        (FALLBACK, [3], 2, Finding.IMPROVEMENT, "3 -> 2 count"),
        (FALLBACK, [3, 2], 2, Finding.UNCHANGED, "2, as before"),
        (DELEGATED, [72], 60, Finding.CHANGED, "72 -> 60 count"),
        (DELEGATED, [7], 9, Finding.CHANGED, "7 -> 9 count"),
        (FALLBACK, [], 9, Finding.INSUFFICIENT_DATA, "no comparable run"),
        (FALLBACK, [-4], 12, Finding.REGRESSION, "-4 -> 12 count"),
        (msgspec.structs.replace(FALLBACK, unit="1"), [1], 11, Finding.REGRESSION, "1 -> 11"),
    ],
)
def test_an_exact_metric_alerts_on_any_change(
    series: Series, before: list[float], now: float, finding: Finding, reason: str
) -> None:
    judged = judge(series, before, now)
    assert (judged.finding, judged.reason) == (finding, reason)


def test_a_byte_more_in_a_file_of_a_gigabyte_is_a_change() -> None:
    size = Series("models/llama pte_size", "pte_size", "bytes", Direction.LOWER, exact=True)
    assert judge(size, [1_000_000_000.0] * 30, 1_000_000_001.0).finding is Finding.REGRESSION


def test_a_metric_of_which_neither_way_is_better_only_changes() -> None:
    neutral = msgspec.structs.replace(LATENCY, direction=Direction.NONE)
    assert judge(neutral, noisy(21), 1.2e6).finding is Finding.CHANGED


def test_what_the_whole_night_was_off_by_is_taken_out() -> None:
    assert judge(LATENCY, noisy(21), 1.1e6, shift=math.log(1.1)).finding is Finding.UNCHANGED
    assert judge(LATENCY, noisy(21), 1.1e6 * 1.1, shift=math.log(1.1)).finding is Finding.REGRESSION


@PATIENT
@given(st.sampled_from([LATENCY, SQNR, COSINE, TOP1, FALLBACK]), st.lists(EVERYTHING, max_size=30), EVERYTHING)
@example(SQNR, [-math.inf, math.inf] * 5, math.inf)
@example(LATENCY, [1e308] * 10, 5e-324)
def test_no_values_break_it(series: Series, history: list[float], value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judged = judge(series, history, value)
    assert judged.reason
    assert 0.0 <= judged.p_value <= 1.0
    if judged.finding in {Finding.REGRESSION, Finding.IMPROVEMENT}:
        assert not math.isnan(judged.change) or series.exact


@PATIENT
@given(st.lists(st.floats(1e3, 1e9), min_size=8, max_size=30), st.floats(1e3, 1e9), st.sampled_from([2.0**-20, 2.0**9]))
def test_the_unit_does_not_matter(history: list[float], value: float, factor: float) -> None:
    one, other = judge(LATENCY, history, value), judge(LATENCY, [factor * was for was in history], factor * value)
    assert one.change == pytest.approx(other.change, abs=1e-9)
    if abs(abs(one.change) - math.log(1.03)) > 1e-6 and abs(abs(one.sigmas) - 1.5) > 1e-6:
        assert one.finding is other.finding


@PATIENT
@given(st.sampled_from(list(Scale)), st.floats(1e-3, 0.999))
def test_a_scale_is_undone(scale: Scale, value: float) -> None:
    assert unscaled(scale, float(scaled(scale, [value])[0])) == pytest.approx(value)


def test_changes_are_told_as_people_say_them() -> None:
    assert change_text(Scale.RATIO, math.log(1.082)) == "+8.2 %"
    assert change_text(Scale.RATIO, math.log(0.5)) == "-50.0 %"
    assert change_text(Scale.DECIBEL, -0.71) == "-0.7 dB"
    assert change_text(Scale.SHARE, -0.012) == "-0.012"
    assert change_text(Scale.RATIO, math.inf) == "+inf %"
    assert change_text(Scale.BYTES, -4096.0) == "-4,096 bytes"


def test_figures_know_how_they_are_compared() -> None:
    assert scale_of("latency", "ns") is Scale.RATIO
    assert scale_of("htp_cycles", "cycles") is Scale.RATIO
    assert scale_of("sqnr_fp32[0]", "dB") is Scale.DECIBEL
    assert scale_of("psnr[0]", "dB") is Scale.DECIBEL
    assert scale_of("cosine_fp32[3]", "1") is Scale.COSINE
    assert scale_of("top1_agreement[0]", "1") is Scale.SHARE
    assert scale_of("host_peak_memory", "bytes") is Scale.RATIO
    # The value may be zero or negative, without a ratio.
    assert scale_of("dsp_heap_difference", "bytes") is Scale.BYTES
    # A factor of 4 in the distance from 1 is 6 dB, as it is of an SQNR.
    assert np.diff(scaled(Scale.COSINE, [0.96, 0.99]))[0] == pytest.approx(6.02, abs=0.01)


def test_a_value_that_flips_is_not_deterministic_from_its_third_turn_on() -> None:
    values = [4.0, 4.0, 5.0, 4.0, 5.0, 5.0, 4.0, 5.0, 6.0]
    judged = [judge(FALLBACK, values[:night], values[night]) for night in range(len(values))]
    way_of = {night: one.finding for night, one in enumerate(judged) if one.finding in SUSPECTED}
    worse, better, known = Finding.REGRESSION, Finding.IMPROVEMENT, Finding.CHANGED
    assert way_of == {2: worse, 3: better, 4: worse, 6: better, 7: known, 8: worse}, "the worst so far is news"
    assert judged[6].reason == "5 -> 4 count, the change of direction number 3 in 7 runs: not deterministic"
    assert [one.turns for one in judged] == [0, 0, 0, 1, 2, 0, 3, 4, 4]


def test_a_time_that_repeats_to_the_tick_may_hide_what_is_below_it() -> None:
    judged = judge(LATENCY, [50_000.0] * 20, 50_000.0)
    assert judged.finding is Finding.UNCHANGED
    assert may_hide_regression(LATENCY, judged)
    # Figures repeat because outputs do.
    assert not may_hide_regression(SQNR, judge(SQNR, [41.0] * 20, 41.0))


def test_a_great_change_is_measured_however_much_nights_vary() -> None:
    wild = noisy(21, noise=0.15, seed=3)
    level = float(np.median(wild))
    assert judge(LATENCY, wild, 1.04 * level).finding is Finding.REGRESSION
    assert judge(LATENCY, wild, level / 1.08).finding is Finding.UNCHANGED
    assert judge(LATENCY, wild, level / 1.12).finding is Finding.IMPROVEMENT


def test_what_got_better_has_to_stand_out_more_than_what_got_worse() -> None:
    history = noisy(21, noise=0.02, seed=5)
    level = float(np.median(history))
    sigma = judge(LATENCY, history, level).sigma
    assert judge(LATENCY, history, level * float(np.exp(2.0 * sigma))).finding is Finding.REGRESSION
    assert judge(LATENCY, history, level * float(np.exp(-2.0 * sigma))).finding is Finding.UNCHANGED
    assert judge(LATENCY, history, level * float(np.exp(-2.6 * sigma))).finding is Finding.IMPROVEMENT
