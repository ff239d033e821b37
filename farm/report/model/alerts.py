"""Changed numbers in words: by range of runs, with the size of the change and the user's remark. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from farm.base.text import one_line
from farm.store.records import AlertRecord, AlertState, Remark
from farm.suites.figures import TIME_UNITS

_WORSE, _BETTER = "regression", "improvement"
_TIMES = frozenset({*TIME_UNITS, "us", "cycles"})
UNSURE = {
    AlertState.SUSPECTED: "suspected change, not confirmed yet",
    AlertState.REFUTED: "refuted",
    AlertState.UNKNOWN: "interleaved A/B is unsure",
}
"""Words for a number whose change is not certain."""


def by_range(alerts: Iterable[AlertRecord]) -> list[tuple[str, str, list[AlertRecord]]]:
    """Return alerts by last good and first bad run, the newest range first: a range most likely has one cause."""
    ordered = sorted(alerts, key=lambda one: (one.first_bad, one.last_good), reverse=True)
    return [
        (good, bad, sorted(group, key=_severity))
        for (good, bad), group in groupby(ordered, key=lambda one: (one.last_good, one.first_bad))
    ]


def is_confirmed(alert: AlertRecord) -> bool:
    """Return True for a number that got worse for certain."""
    return alert.finding == _WORSE and alert.state in {AlertState.CONFIRMED, AlertState.EXACT}


def alert_change(alert: AlertRecord) -> str:
    """Return the change of a number: `+8.2 % (+7.1 % to +9.4 %)`; empty without a known change."""
    if math.isnan(alert.change):
        return ""
    from farm.results.analysis.scale import change_text, scale_of

    scale = scale_of(alert.metric, alert.unit)
    change = change_text(scale, alert.change)
    if alert.low == alert.high or not (math.isfinite(alert.low) and math.isfinite(alert.high)):
        return change
    return f"{change} ({change_text(scale, alert.low)} to {change_text(scale, alert.high)})"


def change_of(alert: AlertRecord) -> str:
    """Return the change for a line of its own; for a deterministic number the old and the new value."""
    return (
        one_line(alert.reason) if alert.exact or alert.state == AlertState.EXACT else alert_change(alert) or "changed"
    )


def change_line(alert: AlertRecord) -> str:
    """Return metric, kind of change and change: `latency slower: +12.0 %`."""
    return f"{alert.metric} {word_of(alert)}: {change_of(alert)}"


def word_of(alert: AlertRecord) -> str:
    """Return the kind of change in one word: slower, faster, worse, better, changed."""
    if alert.finding == _WORSE:
        return "slower" if alert.unit in _TIMES else "worse"
    if alert.finding == _BETTER:
        return "faster" if alert.unit in _TIMES else "better"
    return "changed"


def remark_text(remark: Remark) -> str:
    """Return the remark of a user with its owner, who handles it."""
    return f"{remark.state}: {remark.owner or remark.user}{f': {remark.note}' if remark.note else ''}"


def _severity(one: AlertRecord) -> tuple[bool, float, str, str]:
    size = 0.0 if math.isnan(one.change) else -abs(one.change)
    return one.finding != _WORSE, size, one.job_id, one.metric
