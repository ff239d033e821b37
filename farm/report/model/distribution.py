"""The samples of one measurement as a small drawing: how they are spread, not only where their middle is. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from farm.report.model.summary import Spread, spread_of

if TYPE_CHECKING:
    from farm.results.attempt import Attempt, Measurement

WIDTH, HEIGHT = 300, 36
_LEAST_SAMPLES = 3
_LEAST_FOR_BARS = 20
_MOST_BARS = 30
_TIMES = frozenset({"ns", "us", "ms", "s", "cycles"})


class Distribution(msgspec.Struct, frozen=True):
    """The samples of one metric, from their least to their greatest."""

    metric: str
    unit: str
    spread: Spread
    shape: str
    """Path: a line for each sample, or, of many, bars as high as there are samples."""
    bars: bool
    p50: str
    p90: str
    """Where they are, 0 to `WIDTH`."""


def distributions(attempt: Attempt) -> tuple[Distribution, ...]:
    """Return those of its times that have at least three samples which differ."""
    return tuple(one for measured in attempt.measurements if (one := _distribution(measured)) is not None)


def _distribution(measured: Measurement) -> Distribution | None:
    spread = spread_of(measured)
    if spread is None or spread.n < _LEAST_SAMPLES or measured.unit not in _TIMES:
        return None
    if not (math.isfinite(spread.least) and math.isfinite(spread.most) and spread.least < spread.most):
        return None
    samples = sorted(sample for sample in measured.samples if not math.isnan(sample))

    def place(value: float) -> float:
        # Halved first: the difference of two great numbers may be infinite.
        return WIDTH * ((value / 2 - spread.least / 2) / (spread.most / 2 - spread.least / 2))

    bars = spread.n >= _LEAST_FOR_BARS
    places = [place(sample) for sample in samples]
    return Distribution(
        metric=measured.metric,
        unit=measured.unit,
        spread=spread,
        shape=_bars(places) if bars else "".join(f"M{at:.0f} 6v{HEIGHT - 12}" for at in places),
        bars=bars,
        p50=f"{place(spread.p50):.0f}",
        p90=f"{place(spread.p90):.0f}",
    )


def _bars(places: list[float]) -> str:
    count = min(_MOST_BARS, math.ceil(2 * math.sqrt(len(places))))
    counts = [0] * count
    for at in places:
        counts[min(count - 1, int(at * count / WIDTH))] += 1
    wide = WIDTH / count
    return "".join(
        f"M{place * wide:.0f} {HEIGHT}v-{HEIGHT * n / max(counts):.0f}h{wide - 1:.0f}V{HEIGHT}z"
        for place, n in enumerate(counts)
        if n
    )
