"""Choice of the likely cause among the differences of two runs."""

from __future__ import annotations

import math

import pytest

from farm.results.analysis.confirmation import Answer, Confirmation, confirm
from farm.results.analysis.factors import AttributionKind, Factor, explain
from farm.results.analysis.scale import Scale

from .conftest import in_turns

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
    assert found.rest_low < 0.0 < found.rest_high
    assert found.reason.startswith("sdk: sdk +")
    assert "left over" in found.reason


def test_two_factors_share_the_change() -> None:
    found = explain(Scale.RATIO, measured(1.08 * 1.15, 2), swapped(1.08, 1.15, 1.0), THREE)
    assert found.kind is AttributionKind.SEVERAL
    assert found.causes == (RUNTIME, PROGRAM)


def test_factors_that_cancel_each_other_are_both_named() -> None:
    found = explain(Scale.RATIO, measured(1.1, 2, 20), swapped(1.3, 1.1 / 1.3, 1.0, 20), THREE)
    assert found.causes == (PROGRAM, RUNTIME)


def test_what_only_comes_together_is_said_to_be_an_interaction() -> None:
    found = explain(Scale.RATIO, measured(1.2, 3), swapped(1.0, 1.0, 1.0), THREE)
    assert found.kind is AttributionKind.INTERACTION
    assert found.causes == ()
    assert math.exp(found.rest) == pytest.approx(1.2, abs=0.05)


def test_what_was_not_swapped_may_be_it() -> None:
    found = explain(Scale.RATIO, measured(1.2, 3), {PROGRAM: measured(1.0, 7), RUNTIME: measured(1.0, 8)}, THREE)
    assert found.kind is AttributionKind.UNEXPLAINED
    assert found.reason.startswith("sdk not swapped by itself")


def test_nothing_is_explained_where_there_is_nothing() -> None:
    assert explain(Scale.RATIO, measured(1.0, 4), swapped(1.0, 1.0, 1.0), THREE).kind is AttributionKind.NOTHING


def test_a_change_that_is_not_certain_is_not_explained() -> None:
    whole = Confirmation(Answer.UNKNOWN, "", 10, 0.05, -0.01, 0.11, 0.1)
    found = explain(Scale.RATIO, whole, swapped(1.05, 1.0, 1.0), THREE)
    assert found.kind is AttributionKind.UNEXPLAINED
    assert "measure more pairs" in found.reason
    assert explain(Scale.RATIO, measured(1.2, 3), {}, THREE).reason == "no factor was swapped by itself"


def test_a_difference_in_decibels_is_attributed_too() -> None:
    whole = confirm(Scale.DECIBEL, [([41.0], [39.0])] * 10, up=False)
    same = confirm(Scale.DECIBEL, [([41.0], [41.0])] * 10, up=False)
    found = explain(Scale.DECIBEL, whole, {PROGRAM: same, SDK: whole}, (PROGRAM, SDK))
    assert (found.kind, found.causes) == (AttributionKind.FACTOR, (SDK,))
    assert "sdk -2.0 dB" in found.reason


def test_outputs_that_are_no_longer_equal_break_nothing() -> None:
    whole = confirm(Scale.DECIBEL, [([math.inf], [140.0])] * 10, up=False)
    found = explain(Scale.DECIBEL, whole, {PROGRAM: whole}, (PROGRAM,))
    assert (found.kind, found.causes) == (AttributionKind.FACTOR, (PROGRAM,))
