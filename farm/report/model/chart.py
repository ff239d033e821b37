"""Series, trends and histories -> facts and paths of charts. Pure; `reports/charts.js` draws the large ones."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from farm.devices.device import Event, HealthEvent
from farm.report.model import format as fmt
from farm.report.model.history import changed_texts, health_check_p50
from farm.report.model.status import change_line
from farm.report.model.summary import Spread, spread_of
from farm.results.analysis.statistics import GATES, Scale, change_text, scale_of, scaled
from farm.results.attempt import Attempt, Measurement
from farm.store.records import AlertRecord, Background, HistoryPoint, TrendSeries

# Series of values, and distributions of samples -> paths of small drawings. Pure.


WIDTH, HEIGHT = 640, 120
_MARGIN = 8


class ChartPoint(NamedTuple):
    """Value of a chart."""

    place: float
    """Position from left to right, in any unit."""
    value: float
    name: str


class Mark(NamedTuple):
    """Point of a drawn line."""

    x: str
    y: str
    title: str


class Chart(msgspec.Struct, frozen=True):
    """Drawing of one line."""

    label: str
    description: str
    """Content of the drawing in words, for readers without the image."""
    low: str
    """Least value, in words."""
    high: str
    ends: tuple[str, str]
    """Words for the left and the right end."""
    marks: tuple[Mark, ...]

    @property
    def line(self) -> str:
        """Return the corners of the line: `x,y x,y`."""
        return " ".join(f"{mark.x},{mark.y}" for mark in self.marks)


def chart(
    label: str, points: Sequence[ChartPoint], unit: str, ends: tuple[str, str], *, from_zero: bool = True
) -> Chart | None:
    """Return the drawing of the finite values of `points`; None with fewer than two.

    The drawing begins at the least value, or with `from_zero` at zero, so that noise looks small.
    """
    found = [point for point in points if math.isfinite(point.value)]
    if len(found) < 2:
        return None
    places, values = [point.place for point in found], [point.value for point in found]
    low, high = min(values), max(values)
    bottom = min(0.0, low) if from_zero else low

    def words(value: float) -> str:
        return fmt.quantity(value, unit)

    return Chart(
        label=label,
        description=f"{label}, {len(found)} values: from {words(values[0])} to {words(values[-1])}, "
        f"least {words(low)}, most {words(high)}",
        low=words(low),
        high=words(high),
        ends=ends,
        marks=tuple(
            Mark(
                f"{_MARGIN + (WIDTH - 2 * _MARGIN) * fmt.share_between(min(places), max(places), point.place):.1f}",
                f"{HEIGHT - _MARGIN - (HEIGHT - 2 * _MARGIN) * fmt.share_between(bottom, high, point.value):.1f}",
                f"{point.name}: {words(point.value)}",
            )
            for point in found
        ),
    )


SPREAD_WIDTH, SPREAD_HEIGHT = 300, 36
_LEAST_SAMPLES = 3
_LEAST_FOR_BARS = 20
_MOST_BARS = 30
_TIMES = frozenset({"ns", "us", "ms", "s", "cycles"})
# farm/report/model/sections.py draws these metrics as curves.
_CURVES = ("first_token_time[", "step_time[")


class Distribution(msgspec.Struct, frozen=True):
    """Samples of one metric, from the least to the greatest."""

    metric: str
    unit: str
    spread: Spread
    shape: str
    """Path: a line for each sample, or bars of counts for at least 20 samples."""
    bars: bool
    p50: str
    p90: str
    """Positions of p50 and p90, 0 to `SPREAD_WIDTH`."""


def distributions(attempt: Attempt) -> tuple[Distribution, ...]:
    """Return the distributions of times with three samples or more that differ, except metrics drawn as curves."""
    apart = (one for one in attempt.measurements if not one.metric.startswith(_CURVES))
    return tuple(one for measured in apart if (one := _distribution(measured)) is not None)


def _distribution(measured: Measurement) -> Distribution | None:
    if measured.unit not in _TIMES or len(measured.samples) < _LEAST_SAMPLES:
        return None
    spread = spread_of(measured)
    if spread is None or spread.n < _LEAST_SAMPLES or not -math.inf < spread.least < spread.most < math.inf:
        return None
    bars = spread.n >= _LEAST_FOR_BARS
    samples = sorted(sample for sample in measured.samples if not math.isnan(sample))
    *places, p50, p90 = (
        SPREAD_WIDTH * fmt.share_between(spread.least, spread.most, value)
        for value in (*samples, spread.p50, spread.p90)
    )
    return Distribution(
        metric=measured.metric,
        unit=measured.unit,
        spread=spread,
        shape=_bar_path(places) if bars else "".join(f"M{at:.0f} 6v{SPREAD_HEIGHT - 12}" for at in places),
        bars=bars,
        p50=f"{p50:.0f}",
        p90=f"{p90:.0f}",
    )


def _bar_path(places: list[float]) -> str:
    count = min(_MOST_BARS, math.ceil(2 * math.sqrt(len(places))))
    bars = Counter(min(count - 1, int(at * count / SPREAD_WIDTH)) for at in places)
    wide, unit = SPREAD_WIDTH / count, SPREAD_HEIGHT / max(bars.values())
    return "".join(
        f"M{place * wide:.0f} {SPREAD_HEIGHT}v-{unit * n:.0f}h{wide - 1:.0f}V{SPREAD_HEIGHT}z"
        for place, n in sorted(bars.items())
    )


# Trends of a job's main numbers over its runs, as small drawings and a few words. Pure.


TREND_STEP, TREND_HEIGHT = 3, 30
"""Pixels from one run to the next, and from the least to the greatest value."""
SHOWN_STEPS = 40
"""Trends with a step that the page lists by name; every job shows its own."""

_TIME_METRICS = ("latency", "htp_cycles")
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
        times = [metric for metric in _TIME_METRICS if metric in series and kind != "virtual"]
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
            width=TREND_STEP * len(points),
            line=_line(values, least, most),
            steps="".join(f"M{_x(place)} 0v{TREND_HEIGHT}" for place, _ in steps),
            events="".join(f"M{_x(place)} {TREND_HEIGHT}v-7" for place in dict(events)),
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
                (place, text)
                for place, sides in enumerate(pairwise(fingerprints), 1)
                for text in changed_texts(*(self._facts.get(one, {}) for one in sides)).values()
            ]
        return self._changes[fingerprints]


def _x(place: int) -> int:
    return TREND_STEP * place + TREND_STEP // 2


def _line(values: Sequence[float], least: float, most: float) -> str:
    """Return the path of the values: the least at the bottom, infinite values at the edge."""
    parts = []
    pen_up = True
    for place, value in enumerate(values):
        if math.isnan(value):
            pen_up = True
            continue
        share = fmt.share_between(least, most, min(max(value, least), most))
        y = (0 if value > 0 else TREND_HEIGHT) if math.isinf(value) else round(1 + (TREND_HEIGHT - 2) * (1 - share))
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


# Histories of jobs -> facts of charts: series with levels, events and alerts. Pure; `reports/charts.js` draws them.


# Units of axes: the factor of a stored value, and the name of the unit.
_AXES = {"ns": (1e-6, "ms"), "us": (1e-3, "ms"), "s": (1e3, "ms"), "bytes": (1 / 1024, "KiB"), "1": (1.0, "")}
# Facts of a commit, which every point names, and of the command.
_QUIET = frozenset({"commit", "dirty", "executorch_content", "native_runner", "profile", "heap", "seconds"})
_SDK = ("qnn", "skel", "runtime", "hexagon")


class PlotPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a series in a run."""

    run_id: str = ""
    time_ms: int
    value: float
    """In the unit of the plot."""
    n: int
    """Samples."""
    commit: str = ""
    device: str
    failed: bool
    local: bool = False
    """True for a local run, which is no part of the line."""


class PlotLevel(msgspec.Struct, frozen=True):
    """Level of a series between two changes."""

    from_ms: int
    to_ms: int
    value: float


class PlotSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Series of one job on one kind of device, oldest point first."""

    job_id: str
    device_kind: str
    points: list[PlotPoint]
    levels: list[PlotLevel]
    """Empty without a change of level."""


class PlotEvent(msgspec.Struct, frozen=True):
    """Something that changed beside the commit."""

    time_ms: int
    kind: str
    """`toolchain`, `SDK`, `firmware`, `device` or `case`."""
    text: str


class PlotAlert(msgspec.Struct, frozen=True):
    """Alert of a series."""

    id: int
    job_id: str
    run_id: str
    time_ms: int
    text: str


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Chart of one metric over time, of one or several jobs."""

    metric: str
    unit: str
    """Unit of the axis; empty for a plain number."""
    better: str
    """`lower`, `higher` or empty."""
    series: list[PlotSeries]
    events: list[PlotEvent]
    alerts: list[PlotAlert]

    @property
    def text(self) -> str:
        """Content in words, for readers without the image."""
        many = sum(len(one.points) for one in self.series)
        unit = f" in {self.unit}" if self.unit else ""
        return f"{self.metric}{unit} of {len(self.series)} series with {many} values; the table below has the numbers"


def plots_of(
    points: Iterable[HistoryPoint],
    facts: Mapping[str, Mapping[str, str]],
    alerts: Sequence[AlertRecord] = (),
    metrics: Sequence[str] = (),
) -> list[Plot]:
    """Return a plot for each metric with a value, in the order of `metrics`, without them by name.

    `facts` are fingerprints by their hash; series are drawn together where metric and unit agree.
    """
    known = [one for one in points if one.metric and one.value is not None and math.isfinite(one.value)]
    known.sort(key=lambda one: (one.metric, one.unit, one.job_id, one.device_kind, one.time_ms, one.run_id))
    found = []
    for (metric, unit), of_metric in groupby(known, key=lambda one: (one.metric, one.unit)):
        factor, shown = _AXES.get(unit, (1.0, unit))
        series: list[PlotSeries] = []
        events: set[PlotEvent] = set()
        times: dict[tuple[str, str], int] = {}
        for _, group in groupby(of_metric, key=lambda one: (one.job_id, one.device_kind)):
            listed = list(group)
            direction = listed[0].direction
            times |= {(one.job_id, one.run_id): one.time_ms for one in listed}
            series.append(_series(listed, factor))
            events |= set(_events(listed, facts))
        marks = [
            PlotAlert(one.id, one.job_id, one.first_bad, times[one.job_id, one.first_bad], change_line(one))
            for one in alerts
            if one.metric == metric and one.unit == unit and (one.job_id, one.first_bad) in times
        ]
        found.append(
            Plot(
                metric=metric,
                unit=shown,
                better=direction if direction in ("lower", "higher") else "",
                series=series,
                events=sorted(events, key=lambda one: (one.time_ms, one.kind)),
                alerts=marks,
            )
        )
    place = {metric: number for number, metric in enumerate(metrics)}
    return sorted(found, key=lambda one: (place.get(one.metric, len(place)), one.metric))


def health_check_plots(events: Sequence[HealthEvent]) -> list[Plot]:
    """Return the times of a device's health check as a plot, from events, newest first; none with fewer than two."""
    points = [
        PlotPoint(
            time_ms=event.time_ms,
            value=median / 1e6,
            n=len(event.latency_ns),
            device=event.device,
            failed=event.event == Event.CHECK_FAILED,
        )
        for event in reversed(events)
        if (median := health_check_p50(event)) is not None
    ]
    if len(points) < 2:
        return []
    levels = _levels(points, "latency", "ns", 1e-6)
    series = PlotSeries(job_id="", device_kind="", points=points, levels=levels)
    marks = [
        PlotEvent(event.time_ms, "device", f"{event.event}: {event.reason}" if event.reason else event.event)
        for event in reversed(events)
        if event.event not in (Event.CHECK_PASSED, Event.JOB_DONE)
    ]
    return [Plot(metric="health check", unit="ms", better="lower", series=[series], events=marks, alerts=[])]


def _series(points: Sequence[HistoryPoint], factor: float) -> PlotSeries:
    shown = [
        PlotPoint(
            run_id=one.run_id,
            time_ms=one.time_ms,
            value=(one.value or 0.0) * factor,
            n=one.n,
            commit=one.commit or "",
            device=one.device,
            failed=one.verdict == "failed",
            local=bool(one.local),
        )
        for one in points
    ]
    first = points[0]
    levels = _levels([one for one in shown if not one.local], first.metric, first.unit, factor)
    return PlotSeries(job_id=first.job_id, device_kind=first.device_kind, points=shown, levels=levels)


def _levels(points: Sequence[PlotPoint], metric: str, unit: str, factor: float) -> list[PlotLevel]:
    """Return the levels of a series with a change that matters."""
    cuts = [place for place, _ in level_steps(scale_of(metric, unit), [one.value / factor for one in points])]
    if not cuts:
        return []
    parts = [points[begin:end] for begin, end in pairwise([0, *cuts, len(points)])]
    return [
        PlotLevel(part[0].time_ms, part[-1].time_ms, statistics.median(one.value for one in part)) for part in parts
    ]


def _events(points: Sequence[HistoryPoint], facts: Mapping[str, Mapping[str, str]]) -> Iterable[PlotEvent]:
    branch = [one for one in points if not one.local]
    known = {branch[0].device, ""} if branch else set()
    for was, now in pairwise(branch):
        if was.case_version != now.case_version:
            yield PlotEvent(now.time_ms, "case", "another test under the same name")
        # Devices take turns from run to run; only the first run on a device is a mark.
        if now.device not in known:
            known.add(now.device)
            yield PlotEvent(now.time_ms, "device", f"first run on {now.device}")
        if was.fingerprint == now.fingerprint and was.device_facts == now.device_facts:
            continue
        sides = [{**facts.get(one.fingerprint, {}), **one.device_facts} for one in (was, now)]
        for name, text in changed_texts(*sides).items():
            if name not in _QUIET:
                kind = "firmware" if name == "device_build" else "SDK" if name.startswith(_SDK) else "toolchain"
                yield PlotEvent(now.time_ms, kind, text)
