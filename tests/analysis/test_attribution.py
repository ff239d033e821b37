"""First bad run, level of a history, and likely cause of a change."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.numbers.regressions.stored_pairs import BisectOutcome
from farm.results.analysis.attribution import (
    MOST_PROBES,
    AttributionKind,
    Bracket,
    Factor,
    explain,
    narrowed,
    next_probe,
    suspicion,
)
from farm.results.analysis.change_points import change_points
from farm.results.analysis.confirmation import Answer, Confirmation, confirm
from farm.results.analysis.statistics import Scale

from .conftest import PATIENT, in_turns, noisy

# Search for the first bad run, and the number of old bundles that it measures.


STEP = math.log(1.08)


def history(count: int, at: int, seed: int = 0) -> list[float]:
    values = noisy(count, seed=seed)
    return [value * (1.08 if run >= at else 1.0) for run, value in enumerate(values)]


def searched(values: list[float], first: int, change: float = STEP) -> tuple[Bracket, int]:
    """Look for the first bad run with pairs that are always right; return the bracket and the count of measurements."""
    bracket, probes = Bracket(0, len(values) - 1), 0
    weights = suspicion(Scale.RATIO, values, bracket, change)
    while (probe := next_probe(bracket, weights)) is not None:
        probes += 1
        bracket = narrowed(bracket, probe, Answer.CONFIRMED if probe >= first else Answer.REFUTED)
    return bracket, probes


def test_a_range_instead_of_a_run_names_what_was_not_looked_at() -> None:
    runs = [SimpleNamespace(run=SimpleNamespace(id=f"run-{number}")) for number in range(5)]
    whole: Any = None

    def reason(*probes: Any) -> str:
        known: Any = tuple(runs)
        return BisectOutcome(known, (), 0, "phone", "hardware", whole, probes, Bracket(0, 4)).reason

    pruned = [SimpleNamespace(number=number, reason="its bundle is pruned") for number in (1, 2, 3)]
    assert reason(*pruned) == "; ".join(f"run-{number}: its bundle is pruned" for number in (1, 2, 3))
    assert reason(pruned[1]).startswith("run-2: its bundle is pruned; 2 more that were not looked at")


def test_a_history_that_tells_saves_probes() -> None:
    found = [searched(history(22, at, seed), at) for seed in range(5) for at in range(1, 22)]
    assert all(bracket.exact for bracket, _ in found)
    assert np.mean([probes for _, probes in found]) < 2.5
    assert max(probes for _, probes in found) <= MOST_PROBES


@PATIENT
@given(st.integers(2, 40), st.data())
def test_it_is_found_wherever_it_is_and_whatever_the_history_suggests(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, count - 1))
    bracket, _ = searched(noisy(count), first)
    assert (bracket.good, bracket.bad) == (first - 1, first)


def test_a_wild_night_misleads_nobody() -> None:
    values = history(22, 15)
    values[9] *= 1.5
    values[17] *= 0.9
    weights = suspicion(Scale.RATIO, values, Bracket(0, 21), STEP)
    assert int(np.argmax(weights)) == pytest.approx(15, abs=1)


def test_runs_without_a_number_or_without_a_bundle_are_passed_over() -> None:
    values = history(22, 15)
    values[14] = math.nan
    weights = suspicion(Scale.RATIO, values, Bracket(0, 21, frozenset({14})), STEP)
    assert weights.sum() == pytest.approx(1.0)
    bracket = Bracket(13, 15, frozenset({14}))
    assert next_probe(bracket, weights) is None
    assert not bracket.exact
    assert suspicion(Scale.RATIO, [math.nan] * 5, Bracket(0, 4), STEP)[1:] == pytest.approx([0.25] * 4)


def test_an_unknown_answer_is_not_asked_again_and_neighbours_need_no_search() -> None:
    bracket = narrowed(Bracket(0, 3), 1, Answer.UNKNOWN)
    assert bracket == Bracket(0, 3, frozenset({1}))
    assert next_probe(bracket, np.full(4, 0.25)) == 2
    assert next_probe(Bracket(4, 5), np.ones(6)) is None


# Choice of the likely cause among the differences of two runs.


PROGRAM, RUNTIME, SDK = Factor.PROGRAM, Factor.RUNTIME, Factor.SDK
THREE = (PROGRAM, RUNTIME, SDK)


def measured(ratio: float, seed: int, count: int = 10) -> Confirmation:
    return confirm(Scale.RATIO, in_turns(ratio, count=count, seed=seed), up=ratio >= 1.0)


def swapped(program: float, runtime: float, sdk: float, count: int = 10) -> dict[Factor, Confirmation]:
    ratios = zip(THREE, (program, runtime, sdk), strict=True)
    return {factor: measured(ratio, 7 + n, count) for n, (factor, ratio) in enumerate(ratios)}


def test_the_factor_that_makes_the_difference_by_itself_is_named() -> None:
    found = explain(Scale.RATIO, measured(1.1, 1), swapped(1.0, 1.0, 1.1), THREE)
    assert found.kind is AttributionKind.FACTOR
    assert found.causes == (SDK,)
    assert found.reason.startswith("sdk: sdk +")
    assert "left over" in found.reason


@pytest.mark.parametrize(
    ("whole", "swaps", "kind", "causes"),
    [
        (measured(1.08 * 1.15, 2), swapped(1.08, 1.15, 1.0), AttributionKind.SEVERAL, (RUNTIME, PROGRAM)),
        # Factors that cancel each other are both named.
        (measured(1.1, 2, 20), swapped(1.3, 1.1 / 1.3, 1.0, 20), AttributionKind.SEVERAL, (PROGRAM, RUNTIME)),
        (measured(1.2, 3), swapped(1.0, 1.0, 1.0), AttributionKind.INTERACTION, ()),
        (measured(1.0, 4), swapped(1.0, 1.0, 1.0), AttributionKind.NOTHING, ()),
    ],
)
def test_a_change_is_attributed_to_the_factors_that_make_it(
    whole: Confirmation, swaps: dict[Factor, Confirmation], kind: AttributionKind, causes: tuple[Factor, ...]
) -> None:
    found = explain(Scale.RATIO, whole, swaps, THREE)
    assert (found.kind, found.causes) == (kind, causes)
    if kind is AttributionKind.INTERACTION:
        assert math.exp(found.rest) == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize(
    ("whole", "swaps", "reason"),
    [
        (measured(1.2, 3), {PROGRAM: measured(1.0, 7), RUNTIME: measured(1.0, 8)}, "sdk not swapped by itself"),
        (measured(1.2, 3), {}, "no factor was swapped by itself"),
        (Confirmation(Answer.UNKNOWN, "", 10, 0.05, -0.01, 0.11, 0.1), swapped(1.05, 1.0, 1.0), "measure more pairs"),
    ],
)
def test_an_unswapped_factor_or_an_uncertain_change_stays_unexplained(
    whole: Confirmation, swaps: dict[Factor, Confirmation], reason: str
) -> None:
    found = explain(Scale.RATIO, whole, swaps, THREE)
    assert (found.kind, reason in found.reason) == (AttributionKind.UNEXPLAINED, True)


def test_a_difference_in_decibels_is_attributed_too() -> None:
    whole = confirm(Scale.DECIBEL, [([41.0], [39.0])] * 10, up=False)
    same = confirm(Scale.DECIBEL, [([41.0], [41.0])] * 10, up=False)
    found = explain(Scale.DECIBEL, whole, {PROGRAM: same, SDK: whole}, (PROGRAM, SDK))
    assert (found.kind, found.causes) == (AttributionKind.FACTOR, (SDK,))
    assert "sdk -2.0 dB" in found.reason


def test_lost_equality_of_outputs_is_attributed_too() -> None:
    whole = confirm(Scale.DECIBEL, [([math.inf], [140.0])] * 10, up=False)
    found = explain(Scale.DECIBEL, whole, {PROGRAM: whole}, (PROGRAM,))
    assert (found.kind, found.causes) == (AttributionKind.FACTOR, (PROGRAM,))


# Change points: the runs at which a history changes its level.


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
