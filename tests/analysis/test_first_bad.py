"""Search for the first bad run, and the number of old bundles that it measures."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.numbers.regressions.bisect import BisectOutcome
from farm.results.analysis.confirmation import Answer
from farm.results.analysis.first_bad import MOST_PROBES, Bracket, narrowed, next_probe, suspicion
from farm.results.analysis.scale import Scale

from .conftest import PATIENT, noisy

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
