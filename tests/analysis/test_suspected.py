"""Suspected regressions of series, of a whole nightly run, and after alerts."""

from __future__ import annotations

import math
import warnings

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.results.analysis.confirmation import confirm, programs_are_cause
from farm.results.analysis.statistics import Scale, Series, change_text, scale_of, scaled, unscaled
from farm.results.analysis.suspected import (
    SUSPECTED,
    Finding,
    Observation,
    RunJudgement,
    judge,
    judge_run,
    levelled,
    may_hide_regression,
    reference,
)
from farm.results.attempt import Direction

from .conftest import COSINE, DELEGATED, FALLBACK, LATENCY, PATIENT, SQNR, TOP1, in_turns, noisy

# Suspected regressions: gates, directions, exact metrics, and values that are no numbers.


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


# A whole nightly run: suspected regressions, and devices with a common shift.


SERIES = 40


def night(*, hot: float = 1.0, regressed: dict[int, float] | None = None, devices: int = 2) -> list[Observation]:
    """Return a nightly run with all times on device 0 multiplied by `hot`, and `regressed` series by their factor."""
    found = []
    for one in range(SERIES):
        history = noisy(22, level=1e6 * (one + 1), seed=one)
        value = history[-1] * (hot if one % devices == 0 else 1.0) * (regressed or {}).get(one, 1.0)
        series = msgspec.structs.replace(LATENCY, id=f"series {one}")
        found.append(Observation(series, f"device-{one % devices}", history[:-1], value))
    return found


def alarming(night: list[Observation]) -> set[str]:
    return {night[one].series.id for one in judge_run(night).suspected}


def test_a_regression_stands_out_of_a_quiet_night() -> None:
    quiet = night(regressed={7: 1.2})
    seen = judge_run(quiet)
    assert seen.shifts == ()
    assert quiet[seen.suspected[0]].series.id == "series 7", "the least probable comes first"
    assert len(seen.suspected) < 10


def test_a_hot_night_is_one_thing_and_not_twenty_and_hides_no_regression() -> None:
    hot = night(hot=1.1)
    [shift] = judge_run(hot).shifts
    assert (shift.device, shift.metric) == ("device-0", "latency")
    assert math.exp(shift.change) == pytest.approx(1.1, abs=0.02)
    assert shift.reason.startswith("latency of all 20 series of device-0 is off by +")
    assert alarming(hot) == alarming(night())
    regressed = night(hot=1.1, regressed={4: 1.2, 7: 1.2})
    assert alarming(regressed) >= {"series 4", "series 7"}
    assert math.exp(judge_run(regressed).judgements[4].change) == pytest.approx(1.2, abs=0.05)


def test_a_device_that_drifts_is_no_news_and_its_series_are_not_suspected() -> None:
    drifting = [
        msgspec.structs.replace(one, history=[value * math.exp(0.004 * at) for at, value in enumerate(one.history)])
        for one in night()
    ]
    tonight = [msgspec.structs.replace(one, value=one.value * math.exp(0.004 * len(one.history))) for one in drifting]
    seen = judge_run(tonight)
    assert seen.shifts == ()
    assert len(seen.suspected) < 4
    assert len(judge_run([msgspec.structs.replace(one, value=one.value * 1.1) for one in tonight]).shifts) == 2


@pytest.mark.parametrize(
    ("few", "suspected"),
    [
        (night(hot=1.1, devices=8), 5),
        # Half of the series of a device are not the device.
        (night(regressed=dict.fromkeys(range(0, SERIES, 4), 1.15)), 10),
    ],
)
def test_a_few_series_do_not_tell_a_hot_night(few: list[Observation], suspected: int) -> None:
    seen = judge_run(few)
    assert seen.shifts == ()
    assert len(seen.suspected) >= suspected


def test_pairs_tell_a_hot_night_from_a_change_that_slows_everything() -> None:
    everything = night(hot=1.1)
    assert len(judge_run(everything).shifts[0].representatives) == 3
    slower, as_fast = (
        [confirm(Scale.RATIO, in_turns(ratio, seed=seed), up=True) for seed in range(3)] for ratio in (1.1, 1.0)
    )
    assert programs_are_cause(slower)
    for others in (as_fast, [slower[0], *as_fast[:2]], []):
        assert not programs_are_cause(others)
    again = judge_run(everything, programs={("device-0", "latency")})
    assert again.shifts == ()
    assert len(again.suspected) >= 18, "each is a suspected change, to be confirmed and grouped"


def test_exact_metrics_and_figures_are_no_part_of_a_hot_night() -> None:
    exact = Observation(FALLBACK, "device-0", [0.0], 2.0)
    figure = Observation(SQNR, "device-0", [41.0] * 12, 39.0)
    seen = judge_run([*night(hot=1.1), exact, figure])
    assert ("all 20 series" in seen.shifts[0].reason, seen.exact) == (True, (SERIES,))
    assert SERIES + 1 in seen.suspected
    assert seen.judgements[SERIES + 1].change == pytest.approx(-2.0)


def test_an_empty_night_and_young_series_have_nothing() -> None:
    assert judge_run([]) == RunJudgement((), (), (), ())
    young = judge_run([msgspec.structs.replace(one, history=one.history[:3]) for one in night(hot=1.3)])
    assert {one.finding for one in young.judgements} == {Finding.INSUFFICIENT_DATA}
    assert young.shifts == ()


def on_two_devices(count: int, *, apart: float, tonight: float = 1.0) -> list[Observation]:
    """Return series that ran on either of two devices, the second slower, and all on that one tonight."""
    found = []
    for number in range(count):
        devices = ["fast" if (7 * night + number) % 3 else "slow" for night in range(24)]
        values = [
            value * (1.0 + apart * (device == "slow"))
            for value, device in zip(noisy(24, seed=number), devices, strict=True)
        ]
        [value] = noisy(1, 1e6 * (1.0 + apart) * tonight, seed=1000 + number)
        series = Series(str(number), "latency", "ns", Direction.LOWER)
        found.append(Observation(series, "slow", values, value, [(device, "") for device in [*devices, "slow"]]))
    return found


def test_a_device_that_is_always_slower_is_no_shift_and_hides_nothing() -> None:
    quiet = judge_run(on_two_devices(30, apart=0.06))
    assert not quiet.shifts
    assert len(quiet.suspected) <= 5
    blind = judge_run([msgspec.structs.replace(one, places=()) for one in on_two_devices(30, apart=0.06)])
    assert len(blind.suspected) > len(quiet.suspected) or blind.shifts
    found = [judge_run([one]).suspected for one in on_two_devices(30, apart=0.06, tonight=1.08)]
    assert sum(map(len, found)) >= 27
    for one in on_two_devices(3, apart=0.0):
        assert one.past == one.history


def test_eight_phones_with_eight_builds_in_rotation_have_one_history() -> None:
    draw = np.random.default_rng(5)
    effects = draw.uniform(-0.1, 0.1, 8)
    places = [(f"phone-{night % 8}", f"build-{night % 8}") for night in range(41)]
    for tonight, finding in ((1.0, Finding.UNCHANGED), (1.1, Finding.REGRESSION)):
        values = [float(1e6 * np.exp(effects[night % 8] + 0.01 * draw.standard_normal())) for night in range(41)]
        one = Observation(LATENCY, places[-1][0], values[:-1], tonight * values[-1], places)
        [judged] = judge_run([one]).judgements
        assert judged.finding is finding
        assert judged.count == 21
    # A new phone has no effect before it has some values.
    [judged] = judge_run([msgspec.structs.replace(one, places=[*places[:-1], ("new", "build-0")])]).judgements
    assert judged.finding is Finding.INSUFFICIENT_DATA


def test_the_effect_of_a_build_is_known_from_another_phone() -> None:
    draw = np.random.default_rng(6)
    # Phone a got build 2 after 20 nights; phone b gets it tonight. Build 2 is 8 % slower.
    places = [("ab"[night % 2], "2" if night >= 20 and night % 2 == 0 else "1") for night in range(40)]
    values = [1e6 * (1.08 if build == "2" else 1.0) * float(1 + 0.01 * draw.standard_normal()) for _, build in places]
    for tonight, finding in ((1.08e6, Finding.UNCHANGED), (1.08 * 1.08e6, Finding.REGRESSION)):
        [judged] = judge_run([Observation(LATENCY, "b", values, tonight, [*places, ("b", "2")])]).judgements
        assert judged.finding is finding


# Histories of series after alerts: known steps are taken out, and the good bundle is of the newest level.


KNOWN_REGRESSION, KNOWN_IMPROVEMENT = Finding.REGRESSION, Finding.IMPROVEMENT


def test_after_an_alert_the_next_night_is_judged_on_the_new_level() -> None:
    values = [*noisy(20), *(1.1 * value for value in noisy(2, seed=1))]
    assert judge(LATENCY, values, 1.1e6).finding is KNOWN_REGRESSION
    level = levelled(Scale.RATIO, values, {20: math.log(1.1)})
    assert level[20:] == values[20:], "to the last digit"
    assert level[:20] == pytest.approx([1.1 * value for value in values[:20]])
    assert judge(LATENCY, level, 1.1e6).finding is Finding.UNCHANGED
    assert judge(LATENCY, level, 1.21e6).finding is KNOWN_REGRESSION
    assert judge(LATENCY, level, 1.0e6).finding is KNOWN_IMPROVEMENT, "the way back is seen at once"


def test_steps_add_up_and_none_changes_nothing() -> None:
    values = [1.0, 1.1, 1.21]
    assert levelled(Scale.RATIO, values, {1: math.log(1.1), 2: math.log(1.1)}) == pytest.approx([1.21] * 3)
    assert levelled(Scale.DECIBEL, [41.0, 40.0], {1: -1.0}) == [40.0, 40.0]
    assert levelled(Scale.RATIO, values, {}) == values
    # Before a step without a size nothing can be compared.
    lost = levelled(Scale.DECIBEL, [math.inf, math.inf, 140.0], {2: -math.inf})
    assert (math.isnan(lost[0]), lost[2]) == (True, 140.0)


def test_the_good_bundle_is_the_oldest_of_the_baseline_on_its_level() -> None:
    values = noisy(60, seed=1)
    assert reference(LATENCY, values, {}) == 39
    assert reference(LATENCY, values[:12], {}) == 0
    assert reference(LATENCY, values, {10: 0.0, 50: 0.0}) == 50


def test_improvements_are_no_credit_for_what_gets_worse_after_them() -> None:
    for seed in range(10):
        better = [value * 0.99 ** max(0, night - 11) for night, value in enumerate(noisy(22, noise=0.01, seed=seed))]
        good = reference(LATENCY, better, {})
        assert good == 18, "one of the newest level"
        worse = judge(LATENCY, better, 1.08 * 0.99**10 * 1e6)
        assert worse.finding is Finding.REGRESSION
        assert "against the median of 4 runs" in worse.reason
        # A slow change for the worse, never detected, is no new level.
        assert reference(LATENCY, better[::-1], {}) == 1
