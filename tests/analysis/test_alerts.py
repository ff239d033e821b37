"""Histories of series after alerts: known steps are taken out, and the good bundle is of the newest level."""

from __future__ import annotations

import math

import pytest

from farm.results.analysis.scale import Scale
from farm.results.analysis.suspected import Finding, judge, levelled, reference

from .conftest import LATENCY, noisy

REGRESSION, IMPROVEMENT = Finding.REGRESSION, Finding.IMPROVEMENT


def test_after_an_alert_the_next_night_is_judged_on_the_new_level() -> None:
    values = [*noisy(20), *(1.1 * value for value in noisy(2, seed=1))]
    assert judge(LATENCY, values, 1.1e6).finding is REGRESSION
    level = levelled(Scale.RATIO, values, {20: math.log(1.1)})
    assert level[20:] == values[20:], "to the last digit"
    assert level[:20] == pytest.approx([1.1 * value for value in values[:20]])
    assert judge(LATENCY, level, 1.1e6).finding is Finding.UNCHANGED
    assert judge(LATENCY, level, 1.21e6).finding is REGRESSION
    assert judge(LATENCY, level, 1.0e6).finding is IMPROVEMENT, "the way back is seen at once"


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
