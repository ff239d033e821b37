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
