"""Step 2: is the new bundle itself different? From interleaved pairs on one warm device.

Pure. Reasons: docs/explanation/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.results.analysis.robust import (
    NORMAL,
    discoveries,
    median,
    median_and_mad,
    medians,
    middle_of_pairs,
    signed_rank_p,
)
from farm.results.analysis.scale import GATES, Scale, change_text, scaled

PAIRS = 10
"""Pairs of a confirmation; as many again when they leave it unknown."""
INFERENCES = 5
"""Inferences of each bundle in a pair."""
P_CONFIRMED = 0.01
P_REFUTED = 0.07
"""Level at which a change as great as the gate is refuted."""
P_UNSUSPECTED = 0.001
"""For a number that is no suspected change: ten pairs that all point one way are enough."""
CONFIDENCE = 0.95
FALSE_ALERTS = 0.05
"""Share of a run's alerts that may be chance, in the mean."""


class Answer(StrEnum):
    """Answer of pairs to a claimed change."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNKNOWN = "unknown"
    """More pairs may decide."""


class Confirmation(msgspec.Struct, frozen=True):
    """The new bundle against the good one, on one device."""

    answer: Answer
    reason: str
    """Reason in one line."""
    pairs: int
    """Number of comparable pairs."""
    change: float
    """Hodges-Lehmann estimate from good to new, on the scale of the series; NaN without pairs."""
    low: float
    high: float
    """The change's interval, with 95 % confidence."""
    p_value: float
    """Probability of a change in this direction by chance alone (one-sided test)."""


Pair = tuple[Sequence[float], Sequence[float]]
"""Samples of the good bundle and of the new one, measured one after the other; each side counts by its median.

In a list of pairs the good bundle began the pairs of even index; a missing pair has sides without samples.
"""

# A sample is no outlier so many ticks of a coarse clock from the others. A clock is coarse where each time that it
# shows is shown so often.
_NEAR_TICKS = 1.5
_COARSE = 3
# Fewest differences for an estimate of the second place's disadvantage, and the standard errors that it needs: below
# these a correction costs more than it gains.
_LEAST_ORDERED = 6
_ORDER_SIGMAS = 2.5


def confirm(
    scale: Scale,
    pairs: Sequence[Pair],
    *,
    up: bool,
    gate: float | None = None,
    level: float = P_CONFIRMED,
    looks: int = 1,
    base: float = 0.0,
) -> Confirmation:
    """Return whether the new bundle's values are higher (`up`), or lower, than the good one's by more than `gate`.

    `gate` is on `scale`, and so is `base`: the known difference of both bundles, beyond which the change is measured.
    Confirmed: Wilcoxon's signed-rank test of the pairs' differences has p < `level`, and the estimate is beyond the
    gate. Refuted: the same test of the differences' shortfalls from the gate has p < P_REFUTED, and the clock shows
    the gate. Everything else is unknown. `looks` is the number of looks at the pairs, this one included: p holds for
    any of them, and with 0 the pairs can only refute.
    """
    gate = GATES[scale].confirmed if gate is None else gate
    clock = clock_of(scale, pairs)
    differences = _without_order(_differences(scale, pairs, clock.tick))
    differences = differences[~np.isnan(differences)] - base
    count = len(differences)
    if not count:
        return Confirmation(Answer.UNKNOWN, "no pair could be compared", 0, math.nan, -math.inf, math.inf, 1.0)
    sign = 1.0 if up else -1.0
    claimed = sign * differences
    # Signed towards the claim, so that both directions are judged alike to the last digit.
    change, low, high = middle_of_pairs(claimed, CONFIDENCE)
    low, high = low - clock.resolution, high + clock.resolution
    p_value = min(1.0, max(1, looks) * signed_rank_p(claimed))
    answer = Answer.UNKNOWN
    if looks and p_value < level and change > gate:
        answer = Answer.CONFIRMED
    elif clock.resolution <= gate and signed_rank_p(gate - claimed) < P_REFUTED:
        answer = Answer.REFUTED
    if not up:
        change, low, high = -change, -high, -low
    # A few pairs have no interval.
    interval = f" ({change_text(scale, low)} to {change_text(scale, high)})" if high - low < math.inf else ""
    reason = f"{change_text(scale, change)}{interval} in {count} pairs, p = {p_value:.2g}"
    if answer is Answer.UNKNOWN and clock.share > gate:
        reason += f"; the clock ticks in steps of {100.0 * clock.share:.0f} %: use more inferences per turn"
    return Confirmation(answer, reason, count, change, low, high, p_value)


def control(confirmations: Sequence[Confirmation], rate: float = FALSE_ALERTS) -> tuple[Confirmation, ...]:
    """Return the confirmations of a family, all measured after one nightly run, with false discoveries controlled.

    With Benjamini and Hochberg's method at most `rate` of the remaining confirmations are chance, on average; the
    others become unknown. The pairs are independent of the values that raised the suspicion, so that its choice does
    not matter.
    """
    kept = discoveries([one.p_value for one in confirmations], rate)
    why = f"not enough among {len(confirmations)} that were measured"
    return tuple(
        one if keep or one.answer is not Answer.CONFIRMED else unsure(one, why)
        for one, keep in zip(confirmations, kept, strict=True)
    )


def unsure(one: Confirmation, why: str = "and of the measured bundles it was not") -> Confirmation:
    """Return a confirmation as an unknown one."""
    return msgspec.structs.replace(one, answer=Answer.UNKNOWN, reason=f"{one.reason}: {why}")


def alone_level(family: int, rate: float = FALSE_ALERTS) -> float:
    """Return the p-value with which a single change among `family` passes `control`."""
    return rate / max(1, family)


def pairs_needed(suspected: int, rate: float = FALSE_ALERTS) -> int:
    """Return how many pairs let even a single true change among so many suspected changes pass `control`.

    n pairs have no p-value below 2^-n, and 2^(1-n) where the smallest points the other way.
    """
    return max(PAIRS, math.ceil(math.log2(max(1, suspected) / rate)) + 1)


class Clock(NamedTuple):
    """Clock so coarse that most times are equal; zeros for a finer one."""

    tick: float = 0.0
    share: float = 0.0
    """Tick as a share of the times."""
    resolution: float = 0.0
    """Logarithm of a ratio that rounding may hide: a tick, and less the more inferences vary."""


def clock_of(scale: Scale, pairs: Sequence[Pair]) -> Clock:
    """Return the clock that samples are times of."""
    if scale is not Scale.RATIO:
        return Clock()
    samples = [one for pair in pairs for side in pair for one in side if 0.0 < one < math.inf]
    different = set(samples)
    if len(different) < 2 or len(samples) < _COARSE * len(different):
        return Clock()
    tick = min(after - before for before, after in pairwise(sorted(different)))
    share = min(1.0, tick / median(np.array(samples)))
    sides = [np.asarray(side) for pair in pairs for side in pair if len(side) > 1]
    if not sides:
        return Clock(tick, share)
    # Rounding itself has a variance of a twelfth; noise above a third of a tick averages it.
    with np.errstate(all="ignore"):
        varies = float(np.mean([np.var(side / tick, ddof=1) for side in sides])) - 1.0 / 12.0
    return Clock(tick, share, share * math.exp(-2.0 * math.pi**2 * max(0.0, varies)))


def _differences(scale: Scale, pairs: Sequence[Pair], tick: float) -> NDArray[np.float64]:
    """Return what each pair differs by; NaN where it cannot be compared."""
    was, now = (_middles(scale, [pair[side] for pair in pairs], tick) for side in (0, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(now == was, 0.0, now - was)


def _middles(scale: Scale, sides: Sequence[Sequence[float]], tick: float) -> NDArray[np.float64]:
    """Return the middle of each side on the scale: its median, or its mean where a clock shows only whole ticks.

    A duration between two ticks is sometimes shown as the one and sometimes as the other, as often as it is near to it.
    """
    samples = [np.asarray(side, np.float64) for side in sides]
    found = medians([scaled(scale, one) for one in samples])
    if not tick:
        return found
    means = [
        float(np.mean(np.clip(one, (middle := median(one)) - _NEAR_TICKS * tick, middle + _NEAR_TICKS * tick)))
        if known
        else math.nan
        for one, known in zip(samples, ~np.isnan(found), strict=True)
    ]
    return scaled(scale, means)


def _without_order(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences of pairs without the cost of the second place, if that cost is significant.

    In the order good new, new good the device switches to the second program of each pair, which is slower: the new one
    in even pairs, the good one in odd pairs.
    """
    even, odd = (side[~np.isnan(side)] for side in (differences[::2], differences[1::2]))
    if len(even) + len(odd) < _LEAST_ORDERED or min(len(even), len(odd)) < 2:
        return differences
    if not (np.isfinite(even).all() and np.isfinite(odd).all()):
        return differences
    with np.errstate(over="ignore"):
        cost = median(np.subtract.outer(even, odd).ravel()) / 2.0
        without = differences - np.where(np.arange(len(differences)) % 2 == 0, cost, -cost)
        rest = without[~np.isnan(without)]
        _, mad = median_and_mad(rest)
    error = NORMAL * mad / math.sqrt(len(rest))
    return without if math.isfinite(cost) and abs(cost) > _ORDER_SIGMAS * error else differences


def programs_are_cause(confirmations: Iterable[Confirmation]) -> bool:
    """Return whether most representatives of a shift are confirmed, so that the programs cause it and not the night."""
    answers = [one.answer for one in confirmations]
    return 2 * answers.count(Answer.CONFIRMED) > len(answers)
