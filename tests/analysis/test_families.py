"""Suspected changes that step together: few are measured in full, the others are only looked at."""

from __future__ import annotations

import math

import pytest

from farm.results.analysis.confirmation import Answer, Confirmation
from farm.results.analysis.families import common_step, families, member
from farm.results.analysis.scale import Scale
from farm.results.analysis.suspected import Finding, Judgement


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
