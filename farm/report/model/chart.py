"""Series of values, and distributions of samples -> paths of small drawings. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from farm.report.model import format as fmt
from farm.report.model.summary import Spread, spread_of
from farm.results.attempt import Attempt, Measurement

WIDTH, HEIGHT = 640, 120
_MARGIN = 8


class ChartPoint(msgspec.Struct, frozen=True):
    """Value of a chart."""

    place: float
    """Position from left to right, in any unit."""
    value: float
    """Value in the unit of the chart; NaN and infinite values leave a gap."""
    name: str
    """Name of the point: run, prompt or position."""
    time_ms: int = 0
    broken: bool = False
    """True when conditions differ from here on: the line is interrupted."""
    bad: bool = False
    apart: bool = False
    """True for a point outside of the line, such as a local run."""


class Mark(msgspec.Struct, frozen=True):
    """Point of the plot."""

    x: str
    y: str
    title: str
    bad: bool
    apart: bool = False


class Chart(msgspec.Struct, frozen=True):
    """Plot of one line, which may have gaps."""

    label: str
    description: str
    """Content of the plot in words, for readers without the image."""
    low: str
    """Least value, in words."""
    high: str
    first: str
    """Day of the first value."""
    last: str
    lines: tuple[str, ...]
    """Corners of each piece of the line: `x,y x,y`."""
    rules: tuple[str, ...]
    """Positions at which conditions changed, from left to right."""
    marks: tuple[Mark, ...]
    moved: bool
    """True unless all values are equal."""


def chart(label: str, points: Sequence[ChartPoint], words: Callable[[float], str], *, from_zero: bool = False) -> Chart:
    """Return the plot of `points`, from their least value, or from zero if `from_zero` and no value is negative.

    `words` returns a value as text with its unit.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    low = min((point.value for point in finite), default=0.0)
    high = max((point.value for point in finite), default=0.0)
    places = [point.place for point in points]
    across = _scale(min(places, default=0.0), max(places, default=0.0), WIDTH)
    up = _scale(min(0.0, low) if from_zero else low, high, HEIGHT)
    marks, lines, rules = [], [], []
    line: list[str] = []
    for point in points:
        x = f"{across(point.place):.1f}"
        if point.broken:
            rules.append(x)
        if point.broken or not (math.isfinite(point.value) or point.apart):
            lines.append(line)
            line = []
        if math.isfinite(point.value):
            y = f"{HEIGHT - up(point.value):.1f}"
            line += [] if point.apart else [f"{x},{y}"]
            when = f", {fmt.day(point.time_ms)}" if point.time_ms else ""
            marks.append(Mark(x, y, f"{point.name}{when}: {words(point.value)}", point.bad, point.apart))
    lines.append(line)
    days = [fmt.day(point.time_ms) for point in points if point.time_ms]
    description = f"{label}, {len(finite)} values"
    if finite:
        description += (
            f": from {words(finite[0].value)} to {words(finite[-1].value)}, least {words(low)}, most {words(high)}"
        )
    return Chart(
        label=label,
        description=description,
        low=words(low),
        high=words(high),
        first=days[0] if days else "",
        last=days[-1] if days else "",
        lines=tuple(" ".join(one) for one in lines if len(one) > 1),
        rules=tuple(rules),
        marks=tuple(marks),
        moved=low != high,
    )


def _scale(low: float, high: float, size: int) -> Callable[[float], float]:
    """Return the function from a value to its position between the margins; the middle if `low` equals `high`."""
    room = size - 2 * _MARGIN
    if low == high:
        return lambda _: size / 2
    # Halved first: the difference of two great numbers may overflow to infinity, and half of a tiny one may be 0.
    half = high / 2 - low / 2
    return lambda value: _MARGIN + room * ((value / 2 - low / 2) / half) if half else size / 2


SPREAD_WIDTH, SPREAD_HEIGHT = 300, 36
_LEAST_SAMPLES = 3
_LEAST_FOR_BARS = 20
_MOST_BARS = 30
_TIMES = frozenset({"ns", "us", "ms", "s", "cycles"})
# farm/report/model/generation.py draws these metrics as curves.
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
    """Return the distributions of times with three samples or more that differ, except metrics drawn as curves.
    left out."""
    apart = (one for one in attempt.measurements if not one.metric.startswith(_CURVES))
    return tuple(one for measured in apart if (one := _distribution(measured)) is not None)


def _distribution(measured: Measurement) -> Distribution | None:
    spread = spread_of(measured)
    if spread is None or spread.n < _LEAST_SAMPLES or measured.unit not in _TIMES:
        return None
    if not (math.isfinite(spread.least) and math.isfinite(spread.most) and spread.least < spread.most):
        return None
    samples = sorted(sample for sample in measured.samples if not math.isnan(sample))

    def place(value: float) -> float:
        # Halved first: the difference of two great numbers may overflow to infinity.
        return SPREAD_WIDTH * ((value / 2 - spread.least / 2) / (spread.most / 2 - spread.least / 2))

    bars = spread.n >= _LEAST_FOR_BARS
    places = [place(sample) for sample in samples]
    return Distribution(
        metric=measured.metric,
        unit=measured.unit,
        spread=spread,
        shape=_bar_path(places) if bars else "".join(f"M{at:.0f} 6v{SPREAD_HEIGHT - 12}" for at in places),
        bars=bars,
        p50=f"{place(spread.p50):.0f}",
        p90=f"{place(spread.p90):.0f}",
    )


def _bar_path(places: list[float]) -> str:
    count = min(_MOST_BARS, math.ceil(2 * math.sqrt(len(places))))
    counts = [0] * count
    for at in places:
        counts[min(count - 1, int(at * count / SPREAD_WIDTH))] += 1
    wide = SPREAD_WIDTH / count
    return "".join(
        f"M{place * wide:.0f} {SPREAD_HEIGHT}v-{SPREAD_HEIGHT * n / max(counts):.0f}h{wide - 1:.0f}V{SPREAD_HEIGHT}z"
        for place, n in enumerate(counts)
        if n
    )
