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


def test_a_step_is_found_where_it_is_also_among_runs_without_a_number() -> None:
    values = noisy(60)
    values = [*values[:37], *(1.08 * value for value in values[37:])]
    values[10], values[20] = math.nan, math.inf
    [point] = change_points(Scale.RATIO, values)
    assert point.index == 37
    assert math.exp(point.change) == pytest.approx(1.08, abs=0.02)


@pytest.mark.parametrize("levels", [(1.0, 1.1, 1.0), (1.0, 1.1, 1.05, 1.2, 1.0)])
def test_each_step_is_a_change_point(levels: tuple[float, ...]) -> None:
    values = np.repeat(levels, 40) * noisy(40 * len(levels), seed=8)
    found = change_points(Scale.RATIO, values.tolist())
    assert [point.index for point in found] == pytest.approx(range(40, len(values), 40), abs=2)
    assert [point.change > 0 for point in found] == [after > before for before, after in itertools.pairwise(levels)]


def test_single_wild_nights_are_no_level() -> None:
    values = noisy(60, seed=5)
    for night in (7, 30, 31, 58):
        values[night] *= 1.5
    assert change_points(Scale.RATIO, values) == ()


def test_noise_has_no_change_points() -> None:
    found = [change_points(Scale.RATIO, noisy(60, seed=seed)) for seed in range(100)]
    assert sum(map(len, found)) <= 3


@pytest.mark.parametrize("values", [[41.0] * 25, [1.0, 1.0, 1.0, 9.0, 9.0], []])
def test_equal_or_few_runs_have_no_levels(values: list[float]) -> None:
    assert change_points(Scale.DECIBEL, values) == ()


def test_a_history_that_repeats_to_the_bit_changes_where_it_does() -> None:
    [point] = change_points(Scale.DECIBEL, [41.0] * 20 + [39.5] * 5)
    assert (point.index, point.change) == (20, pytest.approx(-1.5))


@PATIENT
@given(st.sampled_from(list(Scale)), st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_no_history_breaks_it(scale: Scale, values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = change_points(scale, values)
    assert all(0 < point.index < len(values) for point in found)
    assert all(a.index < b.index for a, b in itertools.pairwise(found))
