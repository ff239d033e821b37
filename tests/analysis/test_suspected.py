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
REGRESSION, IMPROVEMENT, UNCHANGED = Finding.REGRESSION, Finding.IMPROVEMENT, Finding.UNCHANGED
NEUTRAL = msgspec.structs.replace(LATENCY, direction=Direction.NONE)
SIZE = Series("models/llama pte_size", "pte_size", "bytes", Direction.LOWER, exact=True)
CALM, WILD, WILDER = noisy(21, noise=0.0001), noisy(21, noise=0.3), noisy(21, noise=0.15, seed=3)
WILD_LEVEL, WILDER_LEVEL = float(np.median(WILD)), float(np.median(WILDER))


@pytest.mark.parametrize(
    ("series", "history", "value", "finding"),
    [
        (LATENCY, noisy(21), 0.9e6, IMPROVEMENT),
        (NEUTRAL, noisy(21), 1.2e6, Finding.CHANGED),
        (LATENCY, noisy(8), 2e6, REGRESSION),
        # A change below 3 % is none, however calm the history.
        (LATENCY, CALM, 1.02e6, UNCHANGED),
        (LATENCY, CALM, 1.04e6, REGRESSION),
        # Nights that vary much hide a change up to 3.5 %, and no greater one; what got better has to stand out more.
        (LATENCY, WILD, 1.034 * WILD_LEVEL, UNCHANGED),
        (LATENCY, WILDER, 1.04 * WILDER_LEVEL, REGRESSION),
        (LATENCY, WILDER, WILDER_LEVEL / 1.08, UNCHANGED),
        (LATENCY, WILDER, WILDER_LEVEL / 1.12, IMPROVEMENT),
        # A single wild night in the history hides nothing.
        (LATENCY, [*noisy(20), 9e6], 1.1e6, REGRESSION),
        (LATENCY, [1e6] * 21, 1.02e6, UNCHANGED),
        (LATENCY, [1e6] * 21, 1e6, UNCHANGED),
        # 1 % of the figure, and 12 % of the error's amplitude; the same ratio of a time would be none.
        (SQNR, [90.0] * 12, 89.0, REGRESSION),
        (SQNR, [41.25] * 12, 42.0, IMPROVEMENT),
        (COSINE, [0.9999] * 12, 0.9996, REGRESSION),
        (COSINE, [0.9999] * 12, 0.99995, IMPROVEMENT),
        # Rounding.
        (COSINE, [1.0 - 1e-15] * 12, 1.0 - 3e-15, UNCHANGED),
        (COSINE, [1.0] * 12, 1.0 + 2e-16, UNCHANGED),
        (TOP1, [0.0] * 12, 0.0, UNCHANGED),
        # Outputs that are equal have an infinite SQNR.
        (SQNR, [math.inf] * 12, math.inf, UNCHANGED),
        (SQNR, [40.0] * 12, math.inf, IMPROVEMENT),
        (SQNR, [40.0] * 12, -math.inf, REGRESSION),
        (LATENCY, noisy(21), math.nan, Finding.UNDEFINED),
        (LATENCY, noisy(21), -1.0, Finding.UNDEFINED),
        (FALLBACK, [0.0], math.nan, Finding.UNDEFINED),
        (LATENCY, [*noisy(7), math.nan, math.nan], 1e6, Finding.INSUFFICIENT_DATA),
        (LATENCY, [0.0] * 9, 0.0, UNCHANGED),
        (LATENCY, [0.0] * 9, 5.0, REGRESSION),
        (SIZE, [1_000_000_000.0] * 30, 1_000_000_001.0, REGRESSION),
    ],
)
def test_a_value_is_judged_by_its_history(series: Series, history: list[float], value: float, finding: Finding) -> None:
    assert judge(series, history, value).finding is finding


@pytest.mark.parametrize(
    ("series", "history", "value", "finding", "change", "reason"),
    [
        (LATENCY, noisy(21), 1.1e6, REGRESSION, math.log(1.1), "against the median of 21 runs"),
        (LATENCY, noisy(7), 2e6, Finding.INSUFFICIENT_DATA, None, "7 comparable runs, 8 are needed"),
        (LATENCY, [1e6] * 21, 1.05e6, REGRESSION, None, "+5.0 % against the median of 21 runs, which repeat exactly"),
        (SQNR, [41.25] * 12, 40.5, REGRESSION, -0.75, "-0.8 dB"),
        (SQNR, [math.inf] * 12, 140.0, REGRESSION, -math.inf, ""),
        (SQNR, [40.0, math.inf] * 6, 40.0, Finding.UNDEFINED, None, "finite and infinite"),
        (TOP1, [0.95] * 12, 0.93, REGRESSION, -0.02, ""),
        (FALLBACK, [0, 0], 1, REGRESSION, None, "0 -> 1 count"),
        (FALLBACK, [3], 2, IMPROVEMENT, None, "3 -> 2 count"),
        (FALLBACK, [3, 2], 2, UNCHANGED, None, "2, as before"),
        (DELEGATED, [72], 60, Finding.CHANGED, None, "72 -> 60 count"),
        (DELEGATED, [7], 9, Finding.CHANGED, None, "7 -> 9 count"),
        (FALLBACK, [], 9, Finding.INSUFFICIENT_DATA, None, "no comparable run"),
        (FALLBACK, [-4], 12, REGRESSION, None, "-4 -> 12 count"),
    ],
)
def test_a_judgement_has_its_change_and_its_reason(
    series: Series, history: list[float], value: float, finding: Finding, change: float | None, reason: str
) -> None:
    judged = judge(series, history, value)
    assert judged.finding is finding
    assert reason in judged.reason
    assert change is None or judged.change == pytest.approx(change, rel=0.2)


def test_a_p_value_is_small_for_a_clear_change_and_no_smaller_than_equal_runs_allow() -> None:
    assert judge(LATENCY, noisy(21), 1.1e6).p_value < 0.01
    equal = judge(LATENCY, [1e6] * 21, 1.05e6)
    assert (equal.sigmas, equal.p_value) == (math.inf, pytest.approx(1 / 22))


def test_whether_bad_luck_can_hide_a_regression() -> None:
    def may(history: list[float], value: float, series: Series = LATENCY) -> bool:
        return may_hide_regression(series, judge(series, history, value))

    calm, wild = noisy(21, noise=0.005), noisy(21, noise=0.05)
    assert [may(wild, 1e6), may(calm, 1e6), may(calm, 1.025e6)] == [True, False, True]
    # A value this much better is no accident, even in a noisy series.
    assert not may(wild, 0.8e6)
    # Nothing is known yet, or nothing can be known, or neither way is worse.
    assert [may(calm[:7], 1e6), may(calm, math.nan), may(wild, 1e6, NEUTRAL)] == [True, False, False]
    rate = msgspec.structs.replace(LATENCY, direction=Direction.HIGHER)
    assert [may(calm, 0.975e6, rate), may(calm, 1.025e6, rate)] == [True, False]
    # A time that repeats to the tick may hide smaller changes; figures repeat because outputs do.
    assert [may([50_000.0] * 20, 50_000.0), may([41.0] * 20, 41.0, SQNR)] == [True, False]


def test_only_the_last_21_runs_of_the_newest_level_count() -> None:
    judged = judge(LATENCY, [*noisy(40, level=3e6), *noisy(21)], 1.1e6)
    assert (judged.finding, judged.count) == (REGRESSION, 21)
    fallen = [*noisy(13, level=1.02e6, noise=0.0005), *noisy(8, noise=0.0005)]
    assert [judge(series, fallen, 1e6).count for series in (LATENCY, NEUTRAL)] == [4, 21]


def test_the_common_shift_of_a_night_is_taken_out() -> None:
    assert judge(LATENCY, noisy(21), 1.1e6, shift=math.log(1.1)).finding is UNCHANGED
    assert judge(LATENCY, noisy(21), 1.1e6 * 1.1, shift=math.log(1.1)).finding is REGRESSION


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
    if judged.finding in {REGRESSION, IMPROVEMENT}:
        assert not math.isnan(judged.change) or series.exact


@pytest.mark.parametrize("scale", Scale)
def test_a_scale_is_undone(scale: Scale) -> None:
    for value in (1e-3, 0.3, 0.999):
        assert unscaled(scale, float(scaled(scale, [value])[0])) == pytest.approx(value)


def test_figures_know_how_they_are_compared_and_changes_are_told_as_people_say_them() -> None:
    for metric, unit, scale in (
        ("latency", "ns", Scale.RATIO),
        ("sqnr_fp32[0]", "dB", Scale.DECIBEL),
        ("psnr[0]", "dB", Scale.DECIBEL),
        ("cosine_fp32[3]", "1", Scale.COSINE),
        ("top1_agreement[0]", "1", Scale.SHARE),
        ("host_peak_memory", "bytes", Scale.RATIO),
        # The value may be zero or negative, without a ratio.
        ("dsp_heap_difference", "bytes", Scale.BYTES),
    ):
        assert scale_of(metric, unit) is scale
    # A factor of 4 in the distance from 1 is 6 dB, as it is of an SQNR.
    assert np.diff(scaled(Scale.COSINE, [0.96, 0.99]))[0] == pytest.approx(6.02, abs=0.01)
    for scale, change, text in (
        (Scale.RATIO, math.log(1.082), "+8.2 %"),
        (Scale.RATIO, math.inf, "+inf %"),
        (Scale.DECIBEL, -0.71, "-0.7 dB"),
        (Scale.SHARE, -0.012, "-0.012"),
        (Scale.BYTES, -4096.0, "-4,096 bytes"),
    ):
        assert change_text(scale, change) == text


def test_a_value_that_flips_is_not_deterministic_from_its_third_turn_on() -> None:
    values = [4.0, 4.0, 5.0, 4.0, 5.0, 5.0, 4.0, 5.0, 6.0]
    judged = [judge(FALLBACK, values[:night], values[night]) for night in range(len(values))]
    way_of = {night: one.finding for night, one in enumerate(judged) if one.finding in SUSPECTED}
    worse, better, known = REGRESSION, IMPROVEMENT, Finding.CHANGED
    assert way_of == {2: worse, 3: better, 4: worse, 6: better, 7: known, 8: worse}, "the worst so far is news"
    assert judged[6].reason == "5 -> 4 count, the change of direction number 3 in 7 runs: not deterministic"
    assert [one.turns for one in judged] == [0, 0, 0, 1, 2, 0, 3, 4, 4]


@pytest.mark.parametrize(("sigmas", "finding"), [(2.0, REGRESSION), (-2.0, UNCHANGED), (-2.6, IMPROVEMENT)])
def test_an_improvement_has_to_stand_out_more_than_a_regression(sigmas: float, finding: Finding) -> None:
    history = noisy(21, noise=0.02, seed=5)
    level = float(np.median(history))
    sigma = judge(LATENCY, history, level).sigma
    assert judge(LATENCY, history, level * float(np.exp(sigmas * sigma))).finding is finding
