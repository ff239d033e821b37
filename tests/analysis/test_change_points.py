"""Change points: the runs at which a history changes its level."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.results.analysis.change_points import change_points
from farm.results.analysis.scale import Scale

from .conftest import PATIENT, noisy


def stepped(count: int, at: int, ratio: float, seed: int = 0) -> list[float]:
    values = noisy(count, seed=seed)
    return [*values[:at], *(ratio * value for value in values[at:])]


def test_a_step_is_found_where_it_is() -> None:
    [point] = change_points(Scale.RATIO, stepped(60, 37, 1.08))
    assert point.index == 37
    assert math.exp(point.change) == pytest.approx(1.08, abs=0.02)


def test_a_step_and_the_way_back_are_two() -> None:
    values = stepped(120, 40, 1.1, seed=3)
    values[80:] = [value / 1.1 for value in values[80:]]
    up, down = change_points(Scale.RATIO, values)
    assert (up.index, down.index) == (pytest.approx(40, abs=1), pytest.approx(80, abs=1))
    assert up.change > 0 > down.change


def test_single_wild_nights_are_no_level() -> None:
    values = noisy(60, seed=5)
    for night in (7, 30, 31, 58):
        values[night] *= 1.5
    assert change_points(Scale.RATIO, values) == ()


def test_what_only_varies_has_no_change_points() -> None:
    found = [change_points(Scale.RATIO, noisy(60, seed=seed)) for seed in range(100)]
    assert sum(map(len, found)) <= 3


def test_a_history_that_repeats_to_the_bit_changes_where_it_does() -> None:
    [point] = change_points(Scale.DECIBEL, [41.0] * 20 + [39.5] * 5)
    assert point.index == 20
    assert point.change == pytest.approx(-1.5)
    assert change_points(Scale.DECIBEL, [41.0] * 25) == ()


def test_runs_without_a_number_keep_their_place() -> None:
    values = stepped(60, 30, 1.2)
    values[10], values[20] = math.nan, math.inf
    [point] = change_points(Scale.RATIO, values)
    assert point.index == 30


def test_five_runs_have_no_levels() -> None:
    assert change_points(Scale.RATIO, [1.0, 1.0, 1.0, 9.0, 9.0]) == ()
    assert change_points(Scale.RATIO, []) == ()


@PATIENT
@given(st.sampled_from(list(Scale)), st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_no_history_breaks_it(scale: Scale, values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = change_points(scale, values)
    assert all(0 < point.index < len(values) for point in found)
    assert all(a.index < b.index for a, b in itertools.pairwise(found))


def test_two_hundred_runs_with_many_levels() -> None:
    levels = np.repeat([1.0, 1.1, 1.05, 1.2, 1.0], 40)
    draw = np.random.default_rng(8)
    found = change_points(Scale.RATIO, (1e6 * levels * (1 + 0.02 * draw.standard_normal(200))).tolist())
    assert [point.index for point in found] == pytest.approx([40, 80, 120, 160], abs=2)
