"""The statistics against their definitions, spelled out."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.statistics import (
    discoveries,
    level_sigma,
    median_and_mad,
    middle_of_pairs,
    p_of_next,
    signed_rank_p,
)

from .conftest import PATIENT

FIGURES = st.floats(-1e6, 1e6)


def all_signs(differences: list[float]) -> float:
    """The share of all ways to choose signs with a sum of positive ranks at least as great."""
    # In a tie the negative difference has the greater rank, and zero counts as negative.
    ordered = sorted(differences, key=lambda one: (abs(one), one <= 0))
    seen = sum(rank for rank, one in enumerate(ordered, 1) if one > 0)
    sums = [sum(chosen) for chosen in itertools.product(*((0, rank) for rank in range(1, len(differences) + 1)))]
    return sum(one >= seen for one in sums) / len(sums)


@PATIENT
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9), st.integers(0, 8), st.integers(1, 12))
def test_the_signed_rank_test_counts_signs_also_with_ties(differences: list[int], place: int, more: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = signed_rank_p(np.array(differences, float))
    assert found == pytest.approx(all_signs([float(one) for one in differences]))
    # A greater difference never has a greater p-value.
    greater = list(differences)
    greater[place % len(greater)] += more
    assert signed_rank_p(np.array(greater, float)) <= found


@PATIENT
@given(st.lists(FIGURES, min_size=1, max_size=25))
def test_the_middle_of_pairs_is_the_median_of_their_walsh_averages(differences: list[float]) -> None:
    walsh = [(a + b) / 2 for n, a in enumerate(differences) for b in differences[n:]]
    middle, low, high = middle_of_pairs(np.array(differences), 0.95)
    assert middle == pytest.approx(float(np.median(walsh)), abs=1e-9)
    assert low <= middle + 1e-9
    assert middle <= high + 1e-9
    assert math.isinf(low) == (len(differences) < 6), "five pairs cannot say anything with 95 %"


def test_infinite_and_the_greatest_values_have_a_middle() -> None:
    few = np.array([math.inf] * 4 + [0.001, 0.002, -0.001, 0.003, -0.002, 0.004])
    middle, low, high = middle_of_pairs(few, 0.95)
    assert (middle, low, high) == (pytest.approx(0.0035), -0.001, math.inf)
    assert middle_of_pairs(np.array([math.inf] * 10), 0.95) == (math.inf, math.inf, math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert median_and_mad(np.array([1.7e308, 1.6e308]))[0] == pytest.approx(1.65e308)
        assert middle_of_pairs(np.full(10, 1.7e308), 0.95)[0] == 1.7e308
    assert median_and_mad(np.array([math.inf] * 5)) == (math.inf, 0.0)
    assert median_and_mad(np.array([math.inf, 3.0, 3.0, 4.0, math.inf]))[0] == 4.0
    assert median_and_mad(np.array([1.0, 3.0, 2.0, math.inf, 2.0])) == (2.0, 1.0)
    assert all(math.isnan(one) for one in median_and_mad(np.array([-math.inf, math.inf])))


@PATIENT
@given(st.lists(st.floats(0, 1), max_size=40), st.floats(0.01, 0.5))
def test_discoveries_are_the_smallest_up_to_the_last_that_is_small_enough(p_values: list[float], rate: float) -> None:
    ordered = sorted(p_values)
    enough = [p for rank, p in enumerate(ordered, 1) if p <= rate * rank / len(ordered)]
    expected = tuple(bool(enough) and p <= max(enough) for p in p_values)
    assert discoveries(p_values, rate) == expected


@pytest.mark.parametrize("count", [1, 8, 21, 60])
def test_a_p_value_is_that_of_students_distribution(count: int) -> None:
    from scipy.special import stdtr

    for sigmas in (0.0, 1e-9, *np.linspace(0.01, 40.0, 100), 1e6, 1e150):
        known = 2.0 * stdtr(0.37 * count, -sigmas)
        assert p_of_next(sigmas, count) == p_of_next(-sigmas, count) == pytest.approx(known, rel=1e-9, abs=1e-300)
    assert p_of_next(1e300, count) < 1e-70
    assert p_of_next(math.inf, 20) == pytest.approx(1 / 21)


def test_a_step_does_not_look_like_noise() -> None:
    flat = 0.02 * np.random.default_rng(1).standard_normal(200)
    stepped = flat + np.where(np.arange(200) < 100, 0.0, 5.0)
    assert level_sigma(stepped, 0.0) == pytest.approx(level_sigma(flat, 0.0), rel=0.05)
    assert [level_sigma(np.ones(count), 0.01) for count in (5, 1)] == [0.01, 0.01]
