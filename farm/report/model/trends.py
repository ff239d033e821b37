"""Trends of a job's main numbers over its runs, as small drawings and a few words. Pure."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from farm.report.model import format as fmt
from farm.report.model.chart import share_between
from farm.results.analysis.facts import changed_facts
from farm.results.analysis.history import fact_text
from farm.results.analysis.scale import GATES, Scale, change_text, scale_of, scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.store.records import Background, TrendSeries

STEP, HEIGHT = 3, 30
"""Pixels from one run to the next, and from the least to the greatest value."""
SHOWN_STEPS = 40
"""Trends with a step that the page lists by name; every job shows its own."""

_TIMES = ("latency", "htp_cycles")
_QUALITY = "sqnr_fp32[0]"
_NAMES = {"htp_cycles": "HTP cycles", _QUALITY: "SQNR"}
# With noise alone, three runs in a row rarely differ by so many standard deviations from three others.
_LEAST_RANGE = 2.2
# Share of the threshold below which a change would be shown as 0.
_LEAST_SHOWN = 1 / 60


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


class Trends:
    """Trends of the jobs of a report."""

    def __init__(self, background: Background) -> None:
        self._series, self._facts = background.trends, background.facts
        # Most jobs took part in the same runs, so there are few entries.
        self._changes: dict[tuple[str, ...], list[tuple[int, str]]] = {}

    def of_job(self, job_id: str, kind: str) -> tuple[Trend, ...]:
        """Return the trend of a job's time on devices of `kind`, then of its SQNR; series with one value are left out.

        Virtual devices have no trend of times: the simulator's times depend on its host.
        """
        series = {one.metric: one for one in self._series.get(job_id, ())}
        times = [metric for metric in _TIMES if metric in series and kind != "virtual"]
        made = (self._trend(series[metric]) for metric in (*times[:1], *({_QUALITY} & series.keys())))
        return tuple(one for one in made if one is not None)

    def _trend(self, series: TrendSeries) -> Trend | None:
        # Another version of the case is another test.
        points = [point for point in series.points if point.case == series.points[-1].case]
        values = [math.nan if point.value is None else point.value for point in points]
        finite = [value for value in values if math.isfinite(value)]
        if len(points) < 2 or not finite:
            return None
        scale = scale_of(series.metric, series.unit)
        least, most = min(finite), max(finite)
        steps = level_steps(scale, values)
        events = self._changes_of(tuple(point.fingerprint for point in points))
        happened = [(place, f"{fmt.day(points[place].time_ms)}: {text}") for place, text in events]
        moved = [(place, f"{fmt.day(points[place].time_ms)}: {change_text(scale, one)}") for place, one in steps]
        change, words, tone = _from_median(scale, values), "", ""
        if steps:
            place, change = steps[-1]
            words = f"{change_text(scale, change)} since {fmt.day(points[place].time_ms)}"
            if series.direction in {"lower", "higher"}:
                tone = "worse" if (change > 0) == (series.direction == "lower") else "better"
        elif math.isfinite(change):
            words = "same" if abs(change) < _LEAST_SHOWN * GATES[scale].change else change_text(scale, change)
        return Trend(
            name=_NAMES.get(series.metric, series.metric),
            width=STEP * len(points),
            line=_line(values, least, most),
            steps="".join(f"M{_x(place)} 0v{HEIGHT}" for place, _ in steps),
            events="".join(f"M{_x(place)} {HEIGHT}v-7" for place in dict(events)),
            changes=tuple(text for _, text in sorted(moved + happened, key=lambda one: one[0])),
            toolchain=tuple(text for _, text in happened),
            last=fmt.quantity(values[-1], series.unit),
            change=words,
            stepped=bool(steps),
            tone=tone,
            size=change / GATES[scale].change if math.isfinite(change) else 0.0,
            runs=len(points),
            least=fmt.quantity(least, series.unit),
            most=fmt.quantity(most, series.unit),
        )

    def _changes_of(self, fingerprints: tuple[str, ...]) -> list[tuple[int, str]]:
        """Return the places in a series where the toolchain changed, with the change in words."""
        if fingerprints not in self._changes:
            self._changes[fingerprints] = [
                (place, fact_text(name, old or None, new or None))
                for place, sides in enumerate(pairwise(fingerprints), 1)
                for name, (old, new) in changed_facts(*(self._facts.get(one, {}) for one in sides)).items()
            ]
        return self._changes[fingerprints]


def _x(place: int) -> int:
    return STEP * place + STEP // 2


def _line(values: Sequence[float], least: float, most: float) -> str:
    """Return the path of the values: the least at the bottom, infinite values at the edge."""
    parts = []
    pen_up = True
    for place, value in enumerate(values):
        if math.isnan(value):
            pen_up = True
            continue
        share = share_between(least, most, min(max(value, least), most))
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
