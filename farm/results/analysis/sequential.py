"""Number of pairs, and their processes, until a claim is decided. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from farm.results.analysis.confirmation import Answer, Confirmation, clock_of, confirm
from farm.results.analysis.robust import NORMAL, median, medians
from farm.results.analysis.scale import Scale, change_text, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farm.results.analysis.confirmation import Pair

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


def until_clear(pairs: int, measure: Callable[[Look], bool], is_open: Callable[[int], bool], *, early: bool) -> None:
    """Measure pairs until `is_open`, called with the `looks`, returns that no decision is left.

    `measure` returns whether any pair was measured.
    """
    for look in plan_looks(pairs, early=early):
        if not measure(look) or not is_open(look.looks):
            return


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
