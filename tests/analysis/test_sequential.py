"""Number and order of requested pairs, and the evidence of a claim that is left in new processes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from farm.results.analysis.confirmation import Answer, confirm
from farm.results.analysis.scale import Scale
from farm.results.analysis.sequential import add_pairs, confirmed_again, plan_looks

from .conftest import in_turns


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
