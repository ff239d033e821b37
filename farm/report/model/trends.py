"""Trends of a job's main numbers over its runs, as small drawings and a few words. Pure."""

from __future__ import annotations

import math
import statistics
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from farm.report.model import format as fmt
from farm.results.analysis.history import Point, split
from farm.results.analysis.scale import GATES, Scale, change_text, scale_of, scaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.store.records import Background, TrendPoint, TrendSeries

STEP, HEIGHT = 3, 30
"""Pixels from one run to the next, and from the least to the greatest value."""
SHOWN_STEPS = 40
"""Trends with a step that the page lists by name; every job shows its own."""

_TIMES = ("latency", "htp_cycles")
_QUALITY = "sqnr_fp32[0]"
_NAMES = {"htp_cycles": "HTP cycles", _QUALITY: "SQNR"}
# With noise alone, three runs in a row rarely differ by so many standard deviations from three others.
_LEAST_RANGE = 2.2


class Trend(msgspec.Struct, frozen=True):
    """Metric of one job over its newest runs."""

    name: str
    width: int
    line: str
    """Path of the values, with a gap for a missing value."""
    steps: str
    """Path of the places where a level begins; empty without a step."""
    events: str
    """Path of the places where the toolchain changed."""
    changes: tuple[str, ...]
    """Steps and events in words, oldest first."""
    toolchain: tuple[str, ...]
    """Events among `changes`."""
    last: str
    change: str
    """Newest step, or else the distance of the last value from the median of the earlier ones."""
    stepped: bool
    tone: str
    """Tone of the step: `worse`, `better`, or empty."""
    size: float
    """Change as a multiple of the threshold, with its sign. For sorting."""
    runs: int
    least: str
    most: str


def trends_of(background: Background, job_id: str, kind: str) -> tuple[Trend, ...]:
    """Return the trend of a job's time on devices of `kind`, then of its SQNR; series with one value are left out.

    Virtual devices have no trend of times: the simulator's times depend on its host.
    """
    series = {one.metric: one for one in background.trends.get(job_id, ())}
    times = [metric for metric in _TIMES if metric in series and kind != "virtual"]
    made = (_trend(series[metric], background.facts) for metric in (*times[:1], *({_QUALITY} & series.keys())))
    return tuple(one for one in made if one is not None)


def _trend(series: TrendSeries, facts: Mapping[str, Mapping[str, str]]) -> Trend | None:
    # Another version of the case is another test.
    points = [point for point in series.points if point.case == series.points[-1].case]
    values = [math.nan if point.value is None else point.value for point in points]
    finite = [value for value in values if math.isfinite(value)]
    if len(points) < 2 or not finite:
        return None
    scale = scale_of(series.metric, series.unit)
    least, most = min(finite), max(finite)
    steps = level_steps(scale, values)
    events = _events(tuple((point.run_id, point.time_ms, point.fingerprint) for point in points), facts)
    happened = [(place, f"{_day(points[place])}: {text}") for place, text in events]
    changes = [(place, f"{_day(points[place])}: {change_text(scale, change)}") for place, change in steps] + happened
    change = steps[-1][1] if steps else _from_median(scale, values)
    worse = _is_worse(series.direction, change) if steps else None
    return Trend(
        name=_NAMES.get(series.metric, series.metric),
        width=STEP * len(points),
        line=_line(values, least, most),
        steps="".join(f"M{_x(place)} 0v{HEIGHT}" for place, _ in steps),
        events="".join(f"M{_x(place)} {HEIGHT}v-7" for place in dict(events)),
        changes=tuple(text for _, text in sorted(changes, key=lambda one: one[0])),
        toolchain=tuple(text for _, text in happened),
        last=fmt.quantity(values[-1], series.unit),
        change=_words(scale, change, _day(points[steps[-1][0]]) if steps else ""),
        stepped=bool(steps),
        tone="" if worse is None else "worse" if worse else "better",
        size=change / GATES[scale].change if math.isfinite(change) else 0.0,
        runs=len(points),
        least=fmt.quantity(least, series.unit),
        most=fmt.quantity(most, series.unit),
    )


def _x(place: int) -> int:
    return STEP * place + STEP // 2


def _day(point: TrendPoint) -> str:
    return fmt.day(point.time_ms)


def _words(scale: Scale, change: float, since: str) -> str:
    if since:
        return f"{change_text(scale, change)} since {since}"
    if not math.isfinite(change):
        return ""
    # A smaller change would be shown as 0.
    return "same" if abs(change) < GATES[scale].change / 60 else change_text(scale, change)


def _is_worse(direction: str, change: float) -> bool | None:
    return None if direction not in {"lower", "higher"} else (change > 0) == (direction == "lower")


def _line(values: Sequence[float], least: float, most: float) -> str:
    """Return the path of the values: the least at the bottom, infinite values at the edge."""
    parts = []
    pen_up = True
    for place, value in enumerate(values):
        if math.isnan(value):
            pen_up = True
            continue
        share = 0.5 if least == most else (min(max(value, least), most) / 2 - least / 2) / (most / 2 - least / 2)
        y = (0 if value > 0 else HEIGHT) if math.isinf(value) else round(1 + (HEIGHT - 2) * (1 - share))
        parts.append(f"{'M' if pen_up else 'L'}{_x(place)} {y}")
        pen_up = False
    return "".join(parts)


def level_steps(scale: Scale, values: Sequence[float]) -> list[tuple[int, float]]:
    """Return the places where a level begins that matters, with the size of the change.

    Most of the thousands of series are noise or repeat exactly: the search for levels takes long and is left out there.
    """
    # With NumPy, which commands for a terminal do not need.
    from farm.results.analysis.change_points import LEAST_LEVEL, change_points

    known = [float(number) for number in scaled(scale, values) if math.isfinite(number)]
    if len(known) < 2 * LEAST_LEVEL:
        return []
    means = [sum(known[at : at + LEAST_LEVEL]) / LEAST_LEVEL for at in range(len(known) - LEAST_LEVEL + 1)]
    jumps = sorted(abs(after - before) for before, after in pairwise(known))
    # The median difference of two normal values is 0.954 standard deviations.
    sigma = jumps[len(jumps) // 2] / 0.954
    if max(means) - min(means) < max(GATES[scale].change / 2, _LEAST_RANGE * sigma):
        return []
    return [(one.index, one.change) for one in change_points(scale, values) if abs(one.change) >= GATES[scale].change]


def _from_median(scale: Scale, values: Sequence[float]) -> float:
    before = [value for value in values[:-1] if not math.isnan(value)]
    if not before:
        return math.nan
    was, now = scaled(scale, [statistics.median(before), values[-1]])
    return 0.0 if was == now else float(now) - float(was)


def _events(
    runs: tuple[tuple[str, int, str], ...], facts: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[int, str], ...]:
    return _changes(runs, _Facts(facts))


class _Facts:
    """Facts of fingerprints, shared by all jobs of a report, compared by identity so that they can be a cache key.
    key."""

    def __init__(self, by_hash: Mapping[str, Mapping[str, str]]) -> None:
        self.by_hash = by_hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Facts) and other.by_hash is self.by_hash

    def __hash__(self) -> int:
        return id(self.by_hash)


@lru_cache(maxsize=64)
def _changes(runs: tuple[tuple[str, int, str], ...], facts: _Facts) -> tuple[tuple[int, str], ...]:
    # Most jobs of a report took part in the same runs, so the cache holds few entries.
    points = [
        Point(run_id, time_ms, 0.0, facts.by_hash.get(fingerprint, {}), device_kind="", case_version="")
        for run_id, time_ms, fingerprint in runs
    ]
    places = {run_id: place for place, (run_id, _, _) in enumerate(runs)}
    return tuple((places[event.run_id], event.text) for event in split(points).events)
