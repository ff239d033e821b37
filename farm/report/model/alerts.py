"""Numbers that stand out -> lines for a terminal, the worst of each range of runs first. Pure."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from farm.store.records import AlertState
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.store.records import AlertRecord, Remark

_WORSE, _BETTER = "regression", "improvement"
_TIMES = frozenset({"ns", "us", "cycles"})
_SAID = {
    AlertState.CANDIDATE: "not confirmed yet",
    AlertState.REFUTED: "refuted",
    AlertState.UNKNOWN: "pairs do not tell",
}


def by_range(alerts: Iterable[AlertRecord]) -> list[tuple[str, str, list[AlertRecord]]]:
    """Return alerts by last good and first bad run, the newest range first: most likely one cause each."""
    ordered = sorted(alerts, key=lambda one: (one.first_bad, one.last_good), reverse=True)
    return [
        (good, bad, sorted(group, key=_severity))
        for (good, bad), group in groupby(ordered, key=lambda one: (one.last_good, one.first_bad))
    ]


def change_of(alert: AlertRecord) -> str:
    """Return a change with its interval: `+8.2 % (7.0 to 9.5 %)`; of an exact number from what to what."""
    if alert.exact:
        return one_line(alert.reason)
    from farm.analysis.scale import change_text, scale_of

    scale = scale_of(alert.metric, alert.unit)
    if math.isnan(alert.change):
        return "changed"
    told = change_text(scale, alert.change)
    if math.isnan(alert.low) or math.isnan(alert.high):
        return told
    return f"{told} ({change_text(scale, alert.low)} to {change_text(scale, alert.high)})"


def word_of(alert: AlertRecord) -> str:
    """Return what happened in one word: slower, faster, worse, better, changed."""
    if alert.finding == _WORSE:
        return "slower" if alert.unit in _TIMES else "worse"
    if alert.finding == _BETTER:
        return "faster" if alert.unit in _TIMES else "better"
    return "changed"


def alert_lines(alerts: Sequence[AlertRecord], limit: int) -> list[str]:
    """Return alerts by range of runs, at most `limit` of a range."""
    lines = []
    for good, bad, group in by_range(alerts):
        lines.append(f"  {good} good, {bad} bad")
        for one in group[:limit]:
            lines += [f"    #{one.id} {one.job_id}", f"      {one.metric} {word_of(one)}: {_told(one)}"]
            lines += [f"      guilt: {one.guilt}"] if one.guilt else []
            lines += [f"      {remark_text(one.remark)}"] if one.remark else []
        if len(group) > limit:
            lines.append(f"    and {len(group) - limit} more: --limit")
    return lines


def _told(one: AlertRecord) -> str:
    said = _SAID.get(AlertState(one.state), "")
    return f"{change_of(one)}{f', {said}' if said else ''}"


def remark_text(remark: Remark) -> str:
    """Return what somebody said, and who sees to it."""
    return f"{remark.state}: {remark.owner or remark.user}{f': {remark.note}' if remark.note else ''}"


def _severity(one: AlertRecord) -> tuple[bool, float, str, str]:
    size = 0.0 if math.isnan(one.change) else -abs(one.change)
    return one.finding != _WORSE, size, one.job_id, one.metric
