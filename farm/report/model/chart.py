"""Series of values, and distributions of samples -> paths of small drawings. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from farm.report.model import format as fmt
from farm.report.model.summary import Spread, spread_of
from farm.results.attempt import Attempt, Measurement

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
                f"{_MARGIN + (WIDTH - 2 * _MARGIN) * share_between(min(places), max(places), point.place):.1f}",
                f"{HEIGHT - _MARGIN - (HEIGHT - 2 * _MARGIN) * share_between(bottom, high, point.value):.1f}",
                f"{point.name}: {words(point.value)}",
            )
            for point in found
        ),
    )


def share_between(least: float, most: float, value: float) -> float:
    """Return the place of `value` from `least`, 0, to `most`, 1; one half where the two are equal."""
    # Halved first: the difference of two great numbers may overflow to infinity, and half of a tiny one may be 0.
    span = most / 2 - least / 2
    return (value / 2 - least / 2) / span if span else 0.5


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
    """Return the distributions of times with three samples or more that differ, except metrics drawn as curves."""
    apart = (one for one in attempt.measurements if not one.metric.startswith(_CURVES))
    return tuple(one for measured in apart if (one := _distribution(measured)) is not None)


def _distribution(measured: Measurement) -> Distribution | None:
    if measured.unit not in _TIMES or len(measured.samples) < _LEAST_SAMPLES:
        return None
    spread = spread_of(measured)
    if spread is None or spread.n < _LEAST_SAMPLES:
        return None
    if not (math.isfinite(spread.least) and math.isfinite(spread.most) and spread.least < spread.most):
        return None
    bars = spread.n >= _LEAST_FOR_BARS
    samples = sorted(sample for sample in measured.samples if not math.isnan(sample))
    *places, p50, p90 = (
        SPREAD_WIDTH * share_between(spread.least, spread.most, value) for value in (*samples, spread.p50, spread.p90)
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
    counts = [0] * count
    for at in places:
        counts[min(count - 1, int(at * count / SPREAD_WIDTH))] += 1
    wide = SPREAD_WIDTH / count
    return "".join(
        f"M{place * wide:.0f} {SPREAD_HEIGHT}v-{SPREAD_HEIGHT * n / max(counts):.0f}h{wide - 1:.0f}V{SPREAD_HEIGHT}z"
        for place, n in enumerate(counts)
        if n
    )
