"""Standing of a series against its accepted level, after its established steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from farm.results.analysis.scale import GATES, TURNS, change_text, scale_of
from farm.results.attempt import Direction
from farm.store.records import STEPS, AlertRecord, AlertState, RemarkState

SETTLED_MS = 21 * 86_400_000
"""Time after which a better level is the accepted one: a loss of it is an open alert from then on."""

# Deterministic metrics have no gate: this is rounding of sums.
_ROUNDING = 1e-12
_SETTLED = (RemarkState.ACCEPTED, RemarkState.FIXED)
# States without an answer for a change that could not be measured.
_OPEN = (AlertState.SUSPECTED, AlertState.UNKNOWN)


class Standing(NamedTuple):
    """Level of a series after its steps, and its open alert."""

    level: float = 0.0
    """Distance from the accepted level, on the scale of the series."""
    alert: AlertRecord | None = None
    """Alert of the whole distance, from the first step on; None while the level is not worse than the accepted one."""


def standing(steps: Iterable[AlertRecord], started_ms: Mapping[str, int]) -> Standing:
    """Return the standing of a series after `steps`, oldest first; `started_ms` has the start of runs by id.

    Steps add up: an alert grows with each, and is closed when the level has returned. A step that a user accepted or
    marked as fixed makes its level the accepted one, and so does a better level that lasts. A deterministic metric that
    is none after all has one alert of the worst level. A suspected change of which a part could not be measured stays
    until another answer. An alert that is needed again within that time has its number.
    """
    level = worse = worst = last = 0.0
    turns, since_ms, sign, number = 0, 0, 1.0, 0
    rows: list[AlertRecord] = []
    left: AlertRecord | None = None
    for one in steps:
        settled = (one.remark.state if one.remark else one.state) in _SETTLED
        if one.finding == "regression" and one.state == AlertState.UNKNOWN and one.likely_cause:
            left = None if settled else one if left is None else msgspec.structs.replace(left, newest=one.id)
        elif left is not None and _answers(one, left):
            left = None
        if one.state not in STEPS or one.finding not in ("regression", "improvement"):
            continue
        gate = _ROUNDING if one.exact else GATES[scale_of(one.metric, one.unit)].confirmed
        sign = -1.0 if one.direction == Direction.HIGHER else 1.0
        started = started_ms.get(one.first_bad, 0)
        if started - since_ms >= SETTLED_MS:
            turns, worst = 0, 0.0
            if worse <= 0.0:
                level, rows, number = 0.0, [], 0
        turns += last * one.change < 0.0
        last, since_ms = one.change, started
        level = 0.0 if math.isnan(level + one.change) else level + one.change
        worse = sign * level
        if settled:
            level, worse, worst, rows, turns, number = 0.0, 0.0, 0.0, [], 0, 0
        elif worse > gate or turns >= TURNS:
            number = number or one.id
            rows.append(one)
        else:
            rows = []
        if abs(level) <= gate:
            level = worse = 0.0
        worst = max(worst, worse)
    is_unstable = turns >= TURNS and bool(rows) and rows[0].exact
    if not rows or (worse <= 0.0 and not is_unstable):
        return Standing(level, left)
    return Standing(level, _grown(rows, sign * worst if is_unstable else level, number, alternates=turns >= TURNS))


def _answers(one: AlertRecord, left: AlertRecord) -> bool:
    """Return whether `one` settles `left`, an alert without a measurement: same level before, or the way back."""
    if one.state not in _OPEN:
        return one.last_good < left.first_bad
    return one.finding == "improvement" and bool(one.likely_cause) and one.likely_cause != left.likely_cause


def _grown(rows: list[AlertRecord], level: float, number: int, *, alternates: bool) -> AlertRecord:
    """Return the alert of the first of `rows` with the distance after all of them, and its `number`."""
    first, newest = rows[0], rows[-1]
    if first is newest:
        return first if number == first.id else msgspec.structs.replace(first, id=number, newest=first.id)
    reason = f"{change_text(scale_of(first.metric, first.unit), level)} in {len(rows)} steps: {newest.reason}"
    if first.exact:
        reason = f"{first.reason.partition(' -> ')[0]} -> {newest.reason.partition(' -> ')[2]}"
    elif alternates:
        reason = f"programs alternate between levels: {reason}"
    by = level - newest.change
    return msgspec.structs.replace(
        first, id=number, finding="regression", change=level, low=newest.low + by, high=newest.high + by, reason=reason,
        remark=next((one.remark for one in reversed(rows) if one.remark), None), newest=newest.id,
    )  # fmt: skip
