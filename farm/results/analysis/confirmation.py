"""Step 2: is the new bundle itself different? Interleaved pairs on one warm device, their number, and families of
changes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.results.analysis.statistics import (
    GATES,
    NORMAL,
    Scale,
    change_text,
    discoveries,
    median,
    median_and_mad,
    medians,
    middle_of_pairs,
    scaled,
    signed_rank_p,
)
from farm.results.analysis.suspected import REPRESENTATIVES, Judgement

# Step 2: is the new bundle itself different? From interleaved pairs on one warm device.
#
# Pure. Reasons: docs/explanation/statistics.md.


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


def control(confirmations: Sequence[Confirmation]) -> tuple[Confirmation, ...]:
    """Return the confirmations of a family, all measured after one nightly run, with false discoveries controlled.

    With Benjamini and Hochberg's method at most FALSE_ALERTS of the remaining confirmations are chance, on average; the
    others become unknown. The pairs are independent of the values that raised the suspicion, so that its choice does
    not matter.
    """
    kept = discoveries([one.p_value for one in confirmations], FALSE_ALERTS)
    why = f"not enough among {len(confirmations)} that were measured"
    return tuple(
        one if keep or one.answer is not Answer.CONFIRMED else unsure(one, why)
        for one, keep in zip(confirmations, kept, strict=True)
    )


def unsure(one: Confirmation, why: str = "and of the measured bundles it was not") -> Confirmation:
    """Return a confirmation as an unknown one."""
    return msgspec.structs.replace(one, answer=Answer.UNKNOWN, reason=f"{one.reason}: {why}")


def alone_level(family: int) -> float:
    """Return the p-value with which a single change among `family` passes `control`."""
    return FALSE_ALERTS / max(1, family)


def pairs_needed(suspected: int) -> int:
    """Return how many pairs let even a single true change among so many suspected changes pass `control`.

    n pairs have no p-value below 2^-n, and 2^(1-n) where the smallest points the other way.
    """
    return max(PAIRS, math.ceil(math.log2(max(1, suspected) / FALSE_ALERTS)) + 1)


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


# Number of pairs, and their processes, until a claim is decided. Pure: docs/explanation/statistics.md.


LEAST_PAIRS = 4
"""Fewest pairs that refute."""
P_AGAIN = 0.05
"""For what pairs confirmed, in as many pairs of new processes: luck that stays with a process is gone."""


# Least time of one side in a pair, and its most inferences: short ones need more for the clock.
_TURN_NS = 50e6
MOST_INFERENCES = 20
_SHORT_NS, _MOST_SHORT = 250e3, 100
# Allowed variation of a side's median as a share, equal to the gate of confirmed changes.
_STEADY = 0.02
# Longest time of a side for that, as a longer one heats the device.
_LONGEST_NS = 4e9


def inferences_for(latency_ns: float, least: int) -> int:
    """Return how many inferences a side has in a pair: more of short ones, which a moment can disturb."""
    most = MOST_INFERENCES if latency_ns >= _SHORT_NS else _MOST_SHORT
    return max(least, min(math.ceil(_TURN_NS / latency_ns), most)) if latency_ns > 0.0 else least


def steady_inferences(pairs: Sequence[Pair], least: int, latency_ns: float = 0.0) -> int:
    """Return how many inferences a side has in the next pair, given those so far: more where they vary much.

    So many that the median of a side varies by less than `_STEADY`, up to MOST_INFERENCES and `_LONGEST_NS`, and all of
    them on a clock that ticks in greater steps.
    """
    most = MOST_INFERENCES if latency_ns * MOST_INFERENCES <= _LONGEST_NS else int(_LONGEST_NS / latency_ns)
    several = [pair for pair in pairs if min(map(len, pair)) > 2]
    if clock_of(Scale.RATIO, several).share > _STEADY:
        return max(least, most)
    sides = [scaled(Scale.RATIO, side) for pair in several for side in pair]
    middles = medians(sides)
    known = [np.abs(side - middle) for side, middle in zip(sides, middles, strict=True) if math.isfinite(middle)]
    if not known:
        return least
    spread = NORMAL * median(np.concatenate(known))
    return max(least, min(math.ceil(math.pi / 2.0 * (spread / _STEADY) ** 2), most))


class Look(NamedTuple):
    """Number of pairs for a look, and the decisions allowed there."""

    begin: int
    """Number of the first of them: the good one begins even pairs."""
    pairs: int
    looks: int
    """How often it was looked to confirm by then; with 0 the pairs may only refute."""
    renews: bool
    """New processes begin before them, and load the programs in the other order."""


def plan_looks(pairs: int, *, early: bool) -> Iterator[Look]:
    """Yield what to measure of a claim until it is decided: `pairs`, and as many again of new processes.

    `early`: from the fourth pair on it is looked after each whether all is clear against the claim.
    """
    for looks, begin in ((1, 0), (2, pairs + 1 - pairs % 2)):
        done = 0
        while done < pairs:
            least = 1 if done or looks > 1 else LEAST_PAIRS
            count = min(least if early else pairs, pairs - done)
            last = done + count == pairs
            yield Look(begin + done, count, looks if last else 0, renews=looks > 1 and not done)
            done += count


def add_pairs(known: list[Pair], begin: int, more: Sequence[Pair]) -> None:
    """Add pairs of which the first has the number `begin`, so that each is at the place of its number."""
    known += [((), ())] * (begin - len(known))
    known += more


def confirmed_again(
    scale: Scale, first: Confirmation, pairs: Sequence[Pair], *, up: bool, gate: float, base: float = 0.0
) -> Confirmation:
    """Return a confirmed claim after further `pairs` with new processes each, with the size from these pairs.

    A program may be slow by chance for the life of its process, which pairs of one process cannot show.
    """
    again = confirm(scale, pairs, up=up, gate=gate, level=P_AGAIN, base=base)
    if not again.pairs:
        return first
    if again.answer is Answer.CONFIRMED:
        reason = f"{first.reason}; {again.reason} in new processes"
    else:
        reason = f"{change_text(scale, first.change)} in one process, but {again.reason} in new ones"
    return msgspec.structs.replace(again, reason=reason, p_value=first.p_value, pairs=first.pairs + again.pairs)


# Suspected changes of one run that step together: few are measured in full. Pure: docs/explanation/statistics.md.


LEAST_FAMILY = 5
"""Fewest suspected changes that are a family: with fewer there is nothing to save."""
P_MEMBER = 0.07
"""For a member whose representatives are confirmed: four pairs that all point that way are enough."""

# Changes of a member stand out by so many sigmas, and differ from each other by fewer.
_LEAST_SIGMAS = 2.0
_MOST_APART = 2.0
_LEAST_ERROR = GATES[Scale.RATIO].confirmed / 2.0


def families(keys: Sequence[Hashable], judgements: Sequence[Judgement]) -> list[tuple[int, ...]]:
    """Return which suspected changes step together, by their places, those with the most usual change first.

    Their keys are equal, and their changes are as far as can be seen. The first REPRESENTATIVES of each are to be
    measured like any suspected change.
    """
    by_key: dict[Hashable, list[int]] = {}
    for place, (key, one) in enumerate(zip(keys, judgements, strict=True)):
        if math.isfinite(one.change) and abs(one.sigmas) >= _LEAST_SIGMAS:
            by_key.setdefault((key, one.change > 0), []).append(place)
    found = []
    for places in by_key.values():
        left = places
        while len(left) >= LEAST_FAMILY:
            changes = np.array([judgements[place].change for place in left])
            errors = np.array([max(judgements[place].sigma, _LEAST_ERROR) for place in left])
            agree = np.abs(np.subtract.outer(changes, changes)) <= _MOST_APART * np.hypot.outer(errors, errors)
            most = agree[int(np.argmax(agree.sum(axis=0)))]
            if most.sum() < LEAST_FAMILY:
                break
            middle = median(changes[most])
            members = [place for place, is_member in zip(left, most, strict=True) if is_member]
            found.append(tuple(sorted(members, key=lambda place: (abs(judgements[place].change - middle), place))))
            left = [place for place, is_member in zip(left, most, strict=True) if not is_member]
    return found


def common_step(representatives: Sequence[Confirmation]) -> Confirmation | None:
    """Return the change that most representatives of a family are confirmed to share, with an interval of all these.

    None where they share none. One that is not confirmed was no member, as each of the others may be: they are looked
    at as well.
    """
    confirmed = [one for one in representatives if one.answer is Answer.CONFIRMED]
    if 2 * len(confirmed) <= REPRESENTATIVES:
        return None
    change = median(np.array([one.change for one in confirmed]))
    low, high = min(one.low for one in confirmed), max(one.high for one in confirmed)
    if not all(one.low <= change <= one.high for one in confirmed) or not low * high > 0.0:
        return None
    pairs = sum(one.pairs for one in confirmed)
    worst = max(one.p_value for one in confirmed)
    return Confirmation(Answer.CONFIRMED, "", pairs, change, low, high, worst)


def member(scale: Scale, step: Confirmation, own: Confirmation, named: str) -> Confirmation:
    """Return the confirmation of a member whose few pairs are nearer to the family's `step` than to no change.

    The size is the family's, which is more precise, and the p-value is the member's own; `named` names the family.
    """
    reason = (
        f"{change_text(scale, step.change)} ({change_text(scale, step.low)} to {change_text(scale, step.high)}) as "
        f"measured of {named}, which stepped with it; {own.reason} of its own"
    )
    low, high = min(step.low, own.change), max(step.high, own.change)
    return Confirmation(Answer.CONFIRMED, reason, own.pairs, step.change, low, high, own.p_value)
