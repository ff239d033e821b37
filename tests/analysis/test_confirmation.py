"""Answer of pairs measured in turns: confirmed, refuted, or not yet."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.results.analysis.confirmation import P_UNSUSPECTED, Answer, Confirmation, confirm, control, pairs_needed
from farm.results.analysis.scale import Scale
from farm.results.analysis.sequential import MOST_INFERENCES, steady_inferences

from .conftest import PATIENT, in_turns

if TYPE_CHECKING:
    from farm.results.analysis.confirmation import Pair

SAMPLES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=3)


def test_ten_pairs_confirm_8_percent_on_a_device_that_drifts() -> None:
    output = confirm(Scale.RATIO, in_turns(1.08), up=True)
    assert output.answer is Answer.CONFIRMED
    assert output.p_value < 0.01
    assert output.low < math.log(1.08) < output.high
    assert output.pairs == 10
    assert "in 10 pairs" in output.reason


def test_ten_pairs_refute_a_change_that_is_none() -> None:
    output = confirm(Scale.RATIO, in_turns(1.0, noise=0.01), up=True)
    assert output.answer is Answer.REFUTED
    assert output.high < math.log(1.02)


def test_a_small_change_stays_unknown_however_certain_its_sign() -> None:
    output = confirm(Scale.RATIO, in_turns(1.018, count=10, noise=0.01), up=True)
    assert output.p_value < 0.01
    assert output.low < math.log(1.02) < output.high
    assert output.answer is Answer.UNKNOWN


def test_a_few_pairs_say_nothing() -> None:
    assert confirm(Scale.RATIO, in_turns(1.5, count=5), up=True).answer is Answer.UNKNOWN
    nothing = confirm(Scale.RATIO, [], up=True)
    assert nothing.answer is Answer.UNKNOWN
    assert nothing.pairs == 0


def test_more_pairs_decide_what_ten_left_unknown() -> None:
    pairs = in_turns(1.05, count=40, noise=0.08)
    assert confirm(Scale.RATIO, pairs[:10], up=True).answer is Answer.UNKNOWN
    assert confirm(Scale.RATIO, pairs, up=True).answer is Answer.CONFIRMED


def test_what_nobody_suspected_has_to_be_clearer() -> None:
    all_slower = [([1.0], [1.1 + number / 100]) for number in range(10)]
    assert confirm(Scale.RATIO, all_slower, up=True, level=P_UNSUSPECTED).answer is Answer.CONFIRMED
    but_one = [*all_slower[:9], ([1.01], [1.0])]
    assert confirm(Scale.RATIO, but_one, up=True).answer is Answer.CONFIRMED
    assert confirm(Scale.RATIO, but_one, up=True, level=P_UNSUSPECTED).answer is Answer.UNKNOWN


def test_a_claim_of_slower_is_not_confirmed_by_faster() -> None:
    pairs = in_turns(1 / 1.08)
    assert confirm(Scale.RATIO, pairs, up=True).answer is Answer.REFUTED
    faster = confirm(Scale.RATIO, pairs, up=False)
    assert faster.answer is Answer.CONFIRMED
    assert faster.low < math.log(1 / 1.08) < faster.high < 0


@PATIENT
@given(st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(1e3, 1e6)), min_size=1, max_size=20))
def test_both_ways_are_judged_alike(values: list[tuple[float, float]]) -> None:
    there = confirm(Scale.RATIO, [([good], [new]) for good, new in values], up=True)
    back = confirm(Scale.RATIO, [([new], [good]) for good, new in values], up=False)
    assert there.answer is back.answer
    assert (there.change, there.low, there.high) == pytest.approx((-back.change, -back.high, -back.low))
    assert there.p_value == pytest.approx(back.p_value)


def test_figures_that_repeat_on_a_device_are_decided_by_their_size() -> None:
    assert confirm(Scale.DECIBEL, [([41.0] * 5, [40.0] * 5)] * 10, up=False).answer is Answer.CONFIRMED
    assert confirm(Scale.DECIBEL, [([41.0] * 5, [40.9] * 5)] * 10, up=False).answer is Answer.REFUTED
    assert confirm(Scale.DECIBEL, [([41.0] * 5, [41.0] * 5)] * 10, up=False).answer is Answer.REFUTED


def test_outputs_that_are_equal_with_the_good_bundle_only_are_confirmed() -> None:
    lost = confirm(Scale.DECIBEL, [([math.inf], [140.0])] * 10, up=False)
    assert lost.answer is Answer.CONFIRMED
    assert lost.change == -math.inf
    same = confirm(Scale.DECIBEL, [([math.inf], [math.inf])] * 10, up=False)
    assert same.answer is Answer.REFUTED
    assert same.change == 0.0


def test_a_pair_that_cannot_be_compared_is_left_out() -> None:
    pairs = [*in_turns(1.08), ([], [1.0]), ([1.0], [math.nan]), ([-1.0], [2.0])]
    assert confirm(Scale.RATIO, pairs, up=True).pairs == 10


@PATIENT
@example(Scale.DECIBEL, [([1.7e308, 1.6e308], [-1.7e308]), ([-1.7e308], [1.7e308])] * 4, True)
@given(st.sampled_from(list(Scale)), st.lists(st.tuples(SAMPLES, SAMPLES), max_size=12), st.booleans())
def test_no_samples_break_it(scale: Scale, pairs: list[tuple[list[float], list[float]]], up: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = confirm(scale, pairs, up=up)
    assert 0.0 <= output.p_value <= 1.0
    assert output.answer in Answer


def test_changes_that_are_none_are_rarely_confirmed_and_real_ones_nearly_always() -> None:
    none = [confirm(Scale.RATIO, in_turns(1.0, seed=seed), up=True).answer for seed in range(300)]
    real = [confirm(Scale.RATIO, in_turns(1.08, seed=seed), up=True).answer for seed in range(100)]
    assert none.count(Answer.CONFIRMED) <= 3
    assert none.count(Answer.REFUTED) > 150
    assert real.count(Answer.CONFIRMED) >= 98


def switching(ratio: float, cost: float, count: int = 10, seed: int = 0) -> list[Pair]:
    """Return pairs of a device on which the second program of a pair is slower by the ratio `cost`."""
    pairs = in_turns(ratio, count, seed=seed)
    late = 1.0 + cost
    return [
        (good, [late * one for one in new]) if number % 2 == 0 else ([late * one for one in good], new)
        for number, (good, new) in enumerate(pairs)
    ]


@pytest.mark.parametrize("cost", [0.05, 0.1])
def test_what_it_costs_to_run_second_hides_nothing_and_confirms_nothing(cost: float) -> None:
    real = [confirm(Scale.RATIO, switching(1.08, cost, seed=seed), up=True) for seed in range(60)]
    none = [confirm(Scale.RATIO, switching(1.0, cost, seed=seed), up=True) for seed in range(60)]
    assert sum(one.answer is Answer.CONFIRMED for one in real) >= 58
    assert sum(one.answer is Answer.CONFIRMED for one in none) <= 1
    assert np.mean([one.change for one in real]) == pytest.approx(math.log(1.08), abs=0.005)
    # The order within a missing pair is still known.
    pairs = switching(1.08, cost)
    assert confirm(Scale.RATIO, [*pairs[:3], ((), ()), *pairs[4:]], up=True).answer is Answer.CONFIRMED


def test_the_second_look_costs_its_price() -> None:
    pairs = [([1.0], [1.1 + number / 100]) for number in range(8)]
    once, twice = (confirm(Scale.RATIO, pairs, up=True, looks=looks) for looks in (1, 2))
    assert (once.p_value, twice.p_value) == (1 / 256, 2 / 256)
    assert confirm(Scale.RATIO, pairs[:7], up=True).answer is Answer.CONFIRMED
    assert confirm(Scale.RATIO, pairs[:7], up=True, looks=2).answer is Answer.UNKNOWN


def test_four_pairs_of_ten_that_are_infinite_confirm_nothing() -> None:
    lost = [([math.inf], [140.0])] * 4 + [([41.0], [41.0 - one / 100]) for one in (1, 2, -1, 3, 2, 4)]
    output = confirm(Scale.DECIBEL, lost, up=False)
    assert output.answer is not Answer.CONFIRMED
    assert math.isfinite(output.change)


def ticking(takes: float, count: int, draw: np.random.Generator) -> list[float]:
    """Return the times of inferences with a variation of 1 %, on a clock that ticks every 10 us."""
    took = takes * (1.0 + 0.01 * draw.standard_normal(count))
    return (np.floor(took / 1e4 + draw.random(count)) * 1e4).tolist()


def test_a_clock_that_is_coarser_than_the_step_is_averaged_over_many_inferences() -> None:
    draw = np.random.default_rng(5)
    inside, found = 0, 0
    for _ in range(40):
        pairs = [(ticking(5e4, 100, draw), ticking(5.4e4, 100, draw)) for _ in range(10)]
        output = confirm(Scale.RATIO, pairs, up=True)
        found += output.answer is Answer.CONFIRMED
        inside += output.low <= math.log(1.08) <= output.high
    assert found == 40
    assert inside >= 36


def test_the_interval_of_a_coarse_clock_has_its_resolution() -> None:
    """At 30 % of an inference, 3 % of noise average little: the interval of rounded times alone missed the truth."""
    draw = np.random.default_rng(9)

    def turn(takes: float) -> list[float]:
        return (np.round(takes * (1.0 + 0.03 * draw.standard_normal(5)) / 15.0) * 15.0).tolist()

    truth, within = math.log(1.08), 0
    for _ in range(40):
        nights = 50.0 * draw.uniform(0.9, 1.1) * (1.0 + 0.05 * draw.standard_normal(10))
        found = confirm(Scale.RATIO, [(turn(one), turn(1.08 * one)) for one in nights], up=True)
        within += found.low <= truth <= found.high
        assert found.answer is not Answer.REFUTED
    assert within >= 38


def test_a_coarse_clock_has_more_inferences_in_a_turn() -> None:
    draw = np.random.default_rng(3)
    pairs = [(ticking(5e4, 5, draw), ticking(5e4, 5, draw)) for _ in range(4)]
    assert steady_inferences(pairs, 5) == MOST_INFERENCES


def test_a_clock_that_is_too_coarse_is_said_to_be() -> None:
    draw = np.random.default_rng(0)
    pairs = [(ticking(5e4, 5, draw), ticking(5.15e4, 5, draw)) for _ in range(10)]
    output = confirm(Scale.RATIO, pairs, up=True)
    assert output.answer is Answer.UNKNOWN
    assert "the clock ticks in steps of 20 %" in output.reason
    fine = confirm(Scale.RATIO, in_turns(1.02, noise=0.05), up=True)
    assert "clock" not in fine.reason


def said(p_value: float, answer: Answer = Answer.CONFIRMED) -> Confirmation:
    return Confirmation(answer, "+8.0 %", 10, 0.08, 0.06, 0.1, p_value)


def test_among_many_suspected_changes_the_weakest_confirmation_does_not_count() -> None:
    night = [said(0.0001), said(0.009), *(said(0.6, Answer.REFUTED) for _ in range(30))]
    kept = control(night)
    assert [one.answer for one in kept[:3]] == [Answer.CONFIRMED, Answer.UNKNOWN, Answer.REFUTED]
    assert "not enough among 32 that were measured" in kept[1].reason
    assert control(night[:2]) == tuple(night[:2])
    assert control([]) == ()


def test_the_pairs_that_are_needed_let_a_single_change_through() -> None:
    assert pairs_needed(0) == pairs_needed(25) == 10
    for suspected in (1, 26, 40, 300, 5000):
        best = 2.0 ** -(pairs_needed(suspected) - 1)
        night = [said(best), *(said(1.0, Answer.REFUTED) for _ in range(suspected - 1))]
        assert control(night)[0].answer is Answer.CONFIRMED


def test_the_estimate_is_not_moved_by_one_wild_pair() -> None:
    pairs = list(in_turns(1.08))
    pairs[3] = ([1e6] * 5, [9e6] * 5)
    assert confirm(Scale.RATIO, pairs, up=True).change == pytest.approx(np.log(1.08), abs=0.03)


def test_inferences_that_vary_much_are_taken_in_greater_groups() -> None:
    calm, wild = in_turns(1.0, noise=0.02), in_turns(1.0, noise=0.1)
    assert steady_inferences([], 5) == 5
    assert steady_inferences(calm, 5) == 5
    assert steady_inferences(wild, 5) == MOST_INFERENCES
    # Twenty of half a second each would only heat the device.
    assert steady_inferences(wild, 5, latency_ns=5e8) == 8
    assert steady_inferences(wild, 5, latency_ns=1e10) == 5
    # A single sample a turn, as for a load time, has no variation.
    assert steady_inferences([([1.0], [2.0])] * 4, 5) == 5
