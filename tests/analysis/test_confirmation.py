"""Pairs measured in turns: their answer, number and order, and families of suspected changes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.results.analysis.confirmation import (
    MOST_INFERENCES,
    P_UNSUSPECTED,
    Answer,
    Confirmation,
    Pair,
    add_pairs,
    common_step,
    confirm,
    confirmed_again,
    control,
    families,
    member,
    pairs_needed,
    plan_looks,
    steady_inferences,
)
from farm.results.analysis.statistics import Scale
from farm.results.analysis.suspected import Finding, Judgement

from .conftest import PATIENT, in_turns

# Answer of pairs measured in turns: confirmed, refuted, or not yet.


SAMPLES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=3)
CONFIRMED, REFUTED, UNKNOWN = Answer.CONFIRMED, Answer.REFUTED, Answer.UNKNOWN
ALL_SLOWER = [([1.0], [1.1 + number / 100]) for number in range(10)]
ALL_BUT_ONE_SLOWER = [*ALL_SLOWER[:9], ([1.01], [1.0])]
LOST = [([math.inf], [140.0])]


def answer(scale: Scale, pairs: Sequence[Pair], *, up: bool = True, **more: Any) -> Answer:
    return confirm(scale, pairs, up=up, **more).answer


@pytest.mark.parametrize(
    ("pairs", "up", "found"),
    [
        (in_turns(1.5, count=5), True, UNKNOWN),
        ([], True, UNKNOWN),
        # More pairs decide what ten left unknown.
        (in_turns(1.05, count=40, noise=0.08)[:10], True, UNKNOWN),
        (in_turns(1.05, count=40, noise=0.08), True, CONFIRMED),
        (ALL_BUT_ONE_SLOWER, True, CONFIRMED),
        (in_turns(1 / 1.08), True, REFUTED),
        (in_turns(1 / 1.08), False, CONFIRMED),
    ],
)
def test_pairs_of_times_are_answered(pairs: Sequence[Pair], up: bool, found: Answer) -> None:
    assert answer(Scale.RATIO, pairs, up=up) is found


@pytest.mark.parametrize(
    ("good", "new", "found"),
    [(41.0, 40.0, CONFIRMED), (41.0, 40.9, REFUTED), (41.0, 41.0, REFUTED), (math.inf, math.inf, REFUTED)],
)
def test_figures_that_repeat_on_a_device_are_decided_by_their_size(good: float, new: float, found: Answer) -> None:
    assert answer(Scale.DECIBEL, [([good] * 5, [new] * 5)] * 10, up=False) is found


def test_ten_pairs_on_a_device_that_drifts_bound_the_change() -> None:
    slower = confirm(Scale.RATIO, in_turns(1.08), up=True)
    assert (slower.answer, slower.pairs, "in 10 pairs" in slower.reason) == (CONFIRMED, 10, True)
    assert slower.p_value < 0.01
    assert slower.low < math.log(1.08) < slower.high
    equal = confirm(Scale.RATIO, in_turns(1.0, noise=0.01), up=True)
    assert (equal.answer, equal.high < math.log(1.02)) == (REFUTED, True)
    # A small change stays unknown, however certain its sign.
    small = confirm(Scale.RATIO, in_turns(1.018, count=10, noise=0.01), up=True)
    assert small.p_value < 0.01
    assert (small.answer, small.low < math.log(1.02) < small.high) == (UNKNOWN, True)


def test_an_unsuspected_change_and_a_second_look_have_to_be_clearer() -> None:
    assert answer(Scale.RATIO, ALL_SLOWER, level=P_UNSUSPECTED) is CONFIRMED
    assert answer(Scale.RATIO, ALL_BUT_ONE_SLOWER, level=P_UNSUSPECTED) is UNKNOWN
    once, twice = (confirm(Scale.RATIO, ALL_SLOWER[:8], up=True, looks=looks) for looks in (1, 2))
    assert (once.p_value, twice.p_value) == (1 / 256, 2 / 256)
    assert answer(Scale.RATIO, ALL_SLOWER[:7]) is CONFIRMED
    assert answer(Scale.RATIO, ALL_SLOWER[:7], looks=2) is UNKNOWN


@PATIENT
@given(st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(1e3, 1e6)), min_size=1, max_size=20))
def test_both_ways_are_judged_alike(values: list[tuple[float, float]]) -> None:
    there = confirm(Scale.RATIO, [([good], [new]) for good, new in values], up=True)
    back = confirm(Scale.RATIO, [([new], [good]) for good, new in values], up=False)
    assert there.answer is back.answer
    assert (there.change, there.low, there.high) == pytest.approx((-back.change, -back.high, -back.low))


def test_outputs_that_are_equal_with_the_good_bundle_only_are_confirmed_unless_they_are_few() -> None:
    lost = confirm(Scale.DECIBEL, LOST * 10, up=False)
    assert (lost.answer, lost.change) == (CONFIRMED, -math.inf)
    four = confirm(Scale.DECIBEL, LOST * 4 + [([41.0], [41.0 - one / 100]) for one in (1, 2, -1, 3, 2, 4)], up=False)
    assert four.answer is not CONFIRMED
    assert math.isfinite(four.change)


def test_a_pair_that_cannot_be_compared_is_left_out_and_a_wild_one_moves_nothing() -> None:
    pairs = [*in_turns(1.08), ([], [1.0]), ([1.0], [math.nan]), ([-1.0], [2.0])]
    assert confirm(Scale.RATIO, pairs, up=True).pairs == 10
    pairs[3] = ([1e6] * 5, [9e6] * 5)
    assert confirm(Scale.RATIO, pairs, up=True).change == pytest.approx(np.log(1.08), abs=0.03)


@PATIENT
@example(Scale.DECIBEL, [([1.7e308, 1.6e308], [-1.7e308]), ([-1.7e308], [1.7e308])] * 4, True)
@given(st.sampled_from(list(Scale)), st.lists(st.tuples(SAMPLES, SAMPLES), max_size=12), st.booleans())
def test_no_samples_break_it(scale: Scale, pairs: list[tuple[list[float], list[float]]], up: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = confirm(scale, pairs, up=up)
    assert 0.0 <= output.p_value <= 1.0


def test_changes_that_are_none_are_rarely_confirmed_and_real_ones_nearly_always() -> None:
    none = [answer(Scale.RATIO, in_turns(1.0, seed=seed)) for seed in range(300)]
    real = [answer(Scale.RATIO, in_turns(1.08, seed=seed)) for seed in range(100)]
    assert none.count(CONFIRMED) <= 3
    assert none.count(REFUTED) > 150
    assert real.count(CONFIRMED) >= 98


def switching(ratio: float, cost: float, seed: int = 0) -> list[Pair]:
    """Return pairs of a device on which the second program of a pair is slower by the ratio `cost`."""
    late = 1.0 + cost
    return [
        (good, [late * one for one in new]) if number % 2 == 0 else ([late * one for one in good], new)
        for number, (good, new) in enumerate(in_turns(ratio, seed=seed))
    ]


def test_the_cost_of_running_second_hides_nothing_and_confirms_nothing() -> None:
    real = [confirm(Scale.RATIO, switching(1.08, 0.1, seed), up=True) for seed in range(60)]
    none = [answer(Scale.RATIO, switching(1.0, 0.1, seed)) for seed in range(60)]
    assert sum(one.answer is CONFIRMED for one in real) >= 58
    assert none.count(CONFIRMED) <= 1
    assert np.mean([one.change for one in real]) == pytest.approx(math.log(1.08), abs=0.005)
    # The order within a missing pair is still known.
    pairs = switching(1.08, 0.1)
    assert answer(Scale.RATIO, [*pairs[:3], ((), ()), *pairs[4:]]) is CONFIRMED


def ticking(takes: float, count: int, draw: np.random.Generator) -> list[float]:
    """Return the times of inferences with a variation of 1 %, on a clock that ticks every 10 us."""
    took = takes * (1.0 + 0.01 * draw.standard_normal(count))
    return (np.floor(took / 1e4 + draw.random(count)) * 1e4).tolist()


def test_the_interval_of_a_coarse_clock_has_its_resolution() -> None:
    """At 30 % of an inference, 3 % of noise average little: the interval of rounded times alone missed the truth."""
    draw = np.random.default_rng(9)

    def turn(takes: float) -> list[float]:
        return (np.round(takes * (1.0 + 0.03 * draw.standard_normal(5)) / 15.0) * 15.0).tolist()

    within = 0
    for _ in range(40):
        nights = 50.0 * draw.uniform(0.9, 1.1) * (1.0 + 0.05 * draw.standard_normal(10))
        found = confirm(Scale.RATIO, [(turn(one), turn(1.08 * one)) for one in nights], up=True)
        within += found.low <= math.log(1.08) <= found.high
        assert found.answer is not REFUTED
    assert within >= 38


def test_a_clock_that_is_too_coarse_is_said_to_be_and_has_more_inferences_in_a_turn() -> None:
    draw = np.random.default_rng(0)
    pairs = [(ticking(5e4, 5, draw), ticking(5.15e4, 5, draw)) for _ in range(10)]
    output = confirm(Scale.RATIO, pairs, up=True)
    assert output.answer is UNKNOWN
    assert "the clock ticks in steps of 20 %" in output.reason
    assert "clock" not in confirm(Scale.RATIO, in_turns(1.02, noise=0.05), up=True).reason
    assert steady_inferences(pairs[:4], 5) == MOST_INFERENCES


def said(p_value: float, found: Answer = CONFIRMED) -> Confirmation:
    return Confirmation(found, "+8.0 %", 10, 0.08, 0.06, 0.1, p_value)


def test_among_many_suspected_changes_the_weakest_confirmation_does_not_count() -> None:
    night = [said(0.0001), said(0.009), *(said(0.6, REFUTED) for _ in range(30))]
    kept = control(night)
    assert [one.answer for one in kept[:3]] == [CONFIRMED, UNKNOWN, REFUTED]
    assert "not enough among 32 that were measured" in kept[1].reason
    assert control(night[:2]) == tuple(night[:2])
    assert control([]) == ()


def test_the_pairs_that_are_needed_let_a_single_change_through() -> None:
    assert pairs_needed(0) == pairs_needed(25) == 10
    for suspected in (1, 26, 40, 300, 5000):
        best = 2.0 ** -(pairs_needed(suspected) - 1)
        night = [said(best), *(said(1.0, REFUTED) for _ in range(suspected - 1))]
        assert control(night)[0].answer is CONFIRMED


@pytest.mark.parametrize(
    ("pairs", "latency_ns", "count"),
    [
        ([], 0.0, 5),
        (in_turns(1.0, noise=0.02), 0.0, 5),
        (in_turns(1.0, noise=0.1), 0.0, MOST_INFERENCES),
        # Twenty of half a second each would only heat the device.
        (in_turns(1.0, noise=0.1), 5e8, 8),
        (in_turns(1.0, noise=0.1), 1e10, 5),
        # A single sample a turn, as for a load time, has no variation.
        ([([1.0], [2.0])] * 4, 0.0, 5),
    ],
)
def test_inferences_that_vary_much_are_taken_in_greater_groups(
    pairs: Sequence[Pair], latency_ns: float, count: int
) -> None:
    assert steady_inferences(pairs, 5, latency_ns) == count


# Number and order of requested pairs, and the evidence of a claim that is left in new processes.


@pytest.mark.parametrize("pairs", [1, 4, 10, 11, 20])
@pytest.mark.parametrize("early", [False, True])
def test_twice_as_many_pairs_at_most_and_two_looks_to_confirm(pairs: int, early: bool) -> None:
    looks = list(plan_looks(pairs, early=early))
    assert sum(one.pairs for one in looks) == 2 * pairs
    assert [one.looks for one in looks if one.looks] == [1, 2]
    [renewed] = [one for one in looks if one.renews]
    assert renewed.begin % 2 == 1, "the new program is loaded first"
    assert all(one.begin + one.pairs <= other.begin for one, other in pairwise(looks))
    assert len(looks) == 2 or early


def test_each_pair_is_at_the_place_of_its_number() -> None:
    pairs = [((1.0,), (2.0,))]
    add_pairs(pairs, 3, [((3.0,), (4.0,))])
    assert pairs == [((1.0,), (2.0,)), ((), ()), ((), ()), ((3.0,), (4.0,))]


def test_a_claim_has_the_size_that_it_has_in_new_processes() -> None:
    lucky = confirm(Scale.RATIO, in_turns(1.14, seed=1), up=True)
    again = confirmed_again(Scale.RATIO, lucky, in_turns(1.08, seed=2), up=True, gate=0.02)
    assert again.answer is Answer.CONFIRMED
    assert again.low < math.log(1.08) < again.high
    assert (again.pairs, again.p_value) == (20, lucky.p_value)
    gone = confirmed_again(Scale.RATIO, lucky, in_turns(1.0, seed=3, noise=0.01), up=True, gate=0.02)
    assert gone.answer is Answer.REFUTED
    assert confirmed_again(Scale.RATIO, lucky, [], up=True, gate=0.02) == lucky


# Suspected changes that step together: few are measured in full, the others are only looked at.


def suspected(change: float, sigma: float = 0.02) -> Judgement:
    return Judgement(Finding.REGRESSION, "", 21, 1e6, change, change / sigma, sigma, 0.001)


def confirmed(change: float, half: float = 0.02, answer: Answer = Answer.CONFIRMED) -> Confirmation:
    return Confirmation(answer, "", 20, change, change - half, change + half, 0.001)


def test_changes_of_one_size_on_one_device_are_a_family_and_the_most_usual_ones_stand_for_it() -> None:
    changes = [0.09, 0.08, 0.3, 0.07, 0.081, 0.079, -0.08]
    [family] = families(["phone"] * 7, [suspected(change) for change in changes])
    assert set(family) == {0, 1, 3, 4, 5}
    assert set(family[:3]) == {1, 4, 5}


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        (["a", "a", "a", "b", "b", "b"], [0.08] * 6),
        (["a"] * 4, [0.08] * 4),
        (["a"] * 6, [0.06, 0.12, 0.2, 0.3, 0.4, 0.5]),
        (["a"] * 6, [math.inf] * 6),
        (["a"] * 6, [0.035] * 6),
    ],
)
def test_few_or_different_ones_are_none(keys: list[str], changes: list[float]) -> None:
    assert families(keys, [suspected(change) for change in changes]) == []


def test_what_most_representatives_share_is_the_step_of_the_family() -> None:
    step = common_step([confirmed(0.08), confirmed(0.07), confirmed(0.0, answer=Answer.REFUTED)])
    assert step is not None
    assert (step.change, step.low, step.high) == pytest.approx((0.075, 0.05, 0.1))
    assert common_step([confirmed(0.08), confirmed(0.15), confirmed(0.08)]) is None
    refuted = confirmed(0.0, answer=Answer.REFUTED)
    assert common_step([confirmed(0.08), refuted, refuted]) is None


def test_a_member_says_that_it_was_only_looked_at() -> None:
    step = common_step([confirmed(0.08)] * 3)
    assert step is not None
    own = Confirmation(Answer.CONFIRMED, "+8.5 % in 4 pairs, p = 0.062", 4, 0.082, -math.inf, math.inf, 0.0625)
    found = member(Scale.RATIO, step, own, "s/a, s/b, s/c")
    assert (found.change, found.pairs, found.p_value) == (step.change, 4, 0.0625)
    assert found.reason == (
        "+8.3 % (+6.2 % to +10.5 %) as measured of s/a, s/b, s/c, which stepped with it; "
        "+8.5 % in 4 pairs, p = 0.062 of its own"
    )
