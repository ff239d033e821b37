"""Step 2: is the new bundle itself different? From interleaved pairs on one warm device. Pure: docs/regressions.md."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.analysis.robust import difference, discoveries, middle_of_pairs, signed_rank_p
from farm.analysis.scale import GATES, Scale, change_text, scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS = 10
"""Pairs of a confirmation; as many again when they leave it unknown."""
MOST_PAIRS = 20
INFERENCES = 5
"""Of each bundle in a pair."""
P_CONFIRMED = 0.01
P_UNSUSPECTED = 0.001
"""For a number that is no candidate: ten pairs that all point one way are enough."""
CONFIDENCE = 0.95
FALSE_ALERTS = 0.05
"""Share of a night's alerts that may be chance, in the mean."""


class Answer(StrEnum):
    """What pairs say about a claimed change."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNKNOWN = "unknown"
    """More pairs may decide."""


class Confirmation(msgspec.Struct, frozen=True):
    """The new bundle against the good one, on one device."""

    answer: Answer
    reason: str
    """One line."""
    pairs: int
    """Those that could be compared."""
    change: float
    """Hodges-Lehmann estimate from good to new, on the scale of the series; NaN without pairs."""
    low: float
    high: float
    """The change's interval, with 95 % confidence."""
    p_value: float
    """One-sided: of a change this way by chance alone."""


Pair = tuple["Sequence[float]", "Sequence[float]"]
"""Samples of the good bundle and of the new one, measured one after the other; each side counts by its median."""


def confirm(
    scale: Scale, pairs: Sequence[Pair], *, up: bool, gate: float | None = None, level: float = P_CONFIRMED
) -> Confirmation:
    """Return whether the new bundle's values are higher (`up`), or lower, than the good one's by more than `gate`.

    `gate` is on `scale`. Confirmed: Wilcoxon's signed-rank test of the pairs' differences has p < `level`, and
    the estimate is beyond the gate. Refuted: the whole interval is short of the gate. Everything else is unknown.
    """
    gate = GATES[scale].confirmed if gate is None else gate
    differences = _differences(scale, pairs)
    count = len(differences)
    if not count:
        return Confirmation(Answer.UNKNOWN, "no pair could be compared", 0, math.nan, -math.inf, math.inf, 1.0)
    sign = 1.0 if up else -1.0
    claimed = sign * differences
    # Signed towards the claim, so that both directions are judged alike to the last digit.
    change, low, high = middle_of_pairs(claimed, CONFIDENCE)
    p_value = signed_rank_p(claimed)
    answer = Answer.UNKNOWN
    if p_value < level and change > gate:
        answer = Answer.CONFIRMED
    elif high < gate:
        answer = Answer.REFUTED
    if not up:
        change, low, high = -change, -high, -low
    interval = f"{change_text(scale, change)} ({change_text(scale, low)} to {change_text(scale, high)})"
    reason = f"{interval} in {count} pairs, p = {p_value:.2g}"
    return Confirmation(answer, reason, count, change, low, high, p_value)


def control(confirmations: Sequence[Confirmation], rate: float = FALSE_ALERTS) -> tuple[Confirmation, ...]:
    """Return the confirmations of a family, all that were measured of one night, with false discoveries controlled.

    By Benjamini and Hochberg at most `rate` of those that stay confirmed are chance, in the mean; the others become
    unknown. The pairs are independent of what made the candidates, so this holds however those were chosen.
    """
    kept = discoveries([one.p_value for one in confirmations], rate)
    why = f"not enough among {len(confirmations)} that were measured"
    return tuple(
        one
        if keep or one.answer is not Answer.CONFIRMED
        else msgspec.structs.replace(one, answer=Answer.UNKNOWN, reason=f"{one.reason}: {why}")
        for one, keep in zip(confirmations, kept, strict=True)
    )


def pairs_needed(candidates: int, rate: float = FALSE_ALERTS) -> int:
    """Return how many pairs let even a single true change among so many candidates pass `control`.

    n pairs have no p-value below 2^-n, and 2^(1-n) where the smallest points the other way.
    """
    return max(PAIRS, math.ceil(math.log2(max(1, candidates) / rate)) + 1)


def _differences(scale: Scale, pairs: Sequence[Pair]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = []
    for good, new in pairs:
        if len(good) and len(new):
            was, now = (float(np.median(scaled(scale, samples))) for samples in (good, new))
            found.append(difference(now, was))
    array = np.array(found, np.float64)
    return array[~np.isnan(array)]
