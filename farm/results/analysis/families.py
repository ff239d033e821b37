"""Suspected changes of one run that step together: few are measured in full. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from farm.results.analysis.confirmation import Answer, Confirmation
from farm.results.analysis.robust import median
from farm.results.analysis.run_judgement import REPRESENTATIVES
from farm.results.analysis.scale import GATES, Scale, change_text
from farm.results.analysis.suspected import Judgement

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
