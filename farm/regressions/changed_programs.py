"""New programs whose numbers do not stand out: they may be slower all the same. Pure: docs/regressions.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.analysis.candidates import Finding, may_hide_regression
from farm.regressions.confirming import TIMES
from farm.results.attempt import Direction

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from farm.analysis.candidates import Judgement
    from farm.regressions.look_back import LookBack, Seen


def changed_programs(looked: LookBack, measured: Mapping[tuple[int, str], Collection[str]]) -> list[int]:
    """Return the numbers, as indices, that are worth pairs though they do not stand out; the most suspicious first.

    They are the time of a job whose program is another than that of the oldest comparable run, where history does not
    rule out that it got worse. `measured` has by series and device kind the runs of which pairs were measured: what was
    asked of a program once is not asked again in later runs of it.
    """
    judgements = looked.night.judgements
    found = [
        index
        for index in _times(looked)
        if may_hide_regression(looked.seen[index].series.series, judgements[index])
        and _is_new(looked.seen[index], measured)
        and not _is_known(looked.seen[index])
    ]
    return sorted(found, key=lambda index: -_worse_by(looked.seen[index], judgements[index]))


def _times(looked: LookBack) -> Collection[int]:
    """Return the number of each job and kind of device that says best how long its program takes."""
    best: dict[tuple[str, str], int] = {}
    for index, seen in enumerate(looked.seen):
        metric, key = seen.series.series.metric, (seen.past.job_id, seen.points[-1].device_kind)
        if metric not in TIMES or seen.series.series.exact:
            continue
        if key not in best or TIMES.index(metric) < TIMES.index(looked.seen[best[key]].series.series.metric):
            best[key] = index
    return best.values()


def _is_new(seen: Seen, measured: Mapping[tuple[int, str], Collection[str]]) -> bool:
    """Tell whether a program has older ones to be compared with, and never was."""
    bundle, kind = seen.points[-1].bundle, seen.points[-1].device_kind
    asked = measured.get((seen.series.id, kind), ())
    runs = {point.run_id for point in seen.points if point.bundle == bundle}
    return bool(bundle) and seen.points[0].bundle != bundle and runs.isdisjoint(asked)


def _is_known(seen: Seen) -> bool:
    """Tell whether a step is known that came with this run, or with one near it: perhaps a later run told of it."""
    return len(seen.points) - 1 in seen.steps or Finding.REGRESSION in seen.told


def _worse_by(seen: Seen, judgement: Judgement) -> float:
    """Return by how many sigmas a number is worse; 0 where too little is known."""
    if judgement.finding is Finding.INSUFFICIENT_DATA:
        return 0.0
    return judgement.sigmas if seen.series.series.direction is Direction.LOWER else -judgement.sigmas
