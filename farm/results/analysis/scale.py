"""How two values of a metric are compared: as a ratio, in dB, or by their difference; and from where on it matters."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.results.attempt import Direction
from farm.suites.figures import LATENCY_TAIL, counter_of, figure_of, is_host_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

LEAST_SIGMA = 0.25
"""A history that repeats to the bit is taken to vary by this share of a suspected change's least change."""

TURNS = 3
"""Changes of direction from which on an exact metric is not deterministic, and the alerts of a series are one."""

# Below this a cosine's distance from 1 is rounding: 120 dB.
_LEAST_DISTANCE = 1e-12


class Scale(StrEnum):
    """Scale for changes of a metric. Changes add up on every scale."""

    RATIO = "ratio"
    """Times, cycles, bytes: the natural logarithm of the ratio."""
    DECIBEL = "dB"
    """Scale of SQNR and PSNR: logarithms, so that a difference means a ratio."""
    COSINE = "cosine"
    """Decibels of the distance from 1: useful cosines begin with 0.99, and their ratio is meaningless."""
    SHARE = "share"
    """Shares between 0 and 1, such as top-1 agreement: the difference."""
    TAIL = "tail"
    """Slow inferences by the median: the difference, with gates of its own, as few inferences make a percentile."""
    BYTES = "bytes"
    """Difference of bytes, for numbers that may be zero or negative, such as kept heap."""


class Gates(msgspec.Struct, frozen=True):
    """From where on a change matters; both gates of a suspected change have to be passed."""

    change: float
    """Least size of a suspected change, on the scale of the metric."""
    sigmas: float
    """Least size of a suspected change in units of the history's variation."""
    confirmed: float
    """Least size of a confirmed change, on the scale of the metric."""
    always: float = math.inf
    """A suspected change however much the history varies: pairs vary by less than nights do."""
    better_sigmas: float = 2.5
    """As `sigmas`, of a change for the better, which can wait: it is seen in a later night, when it is the level."""
    better_always: float = math.inf
    """As `always`, of a change for the better."""


GATES = {
    Scale.RATIO: Gates(math.log(1.03), 1.5, math.log(1.02), math.log(1.035), 2.5, math.log(1.1)),
    Scale.DECIBEL: Gates(0.5, 1.5, 0.25),
    Scale.COSINE: Gates(0.5, 1.5, 0.25),
    Scale.SHARE: Gates(0.01, 1.5, 0.005),
    Scale.TAIL: Gates(0.2, 2.5, 0.1),
    Scale.BYTES: Gates(4096.0, 1.5, 2048.0),
}
"""Their reasons are in docs/explanation/statistics.md."""


class Series(msgspec.Struct, frozen=True):
    """Metric of a job over time."""

    id: str
    """Unique name of the series."""
    metric: str
    unit: str
    direction: Direction
    exact: bool = False
    """Repeats exactly: any change is one."""

    @property
    def scale(self) -> Scale:
        """Return how its values are compared."""
        return scale_of(self.metric, self.unit)

    @property
    def of_outputs(self) -> bool:
        """Tell whether the metric is made of outputs: a program repeats it in every process."""
        return self.unit in ("dB", "1") and not is_host_time(self.metric, self.unit)


def scale_of(metric: str, unit: str) -> Scale:
    """Return how values of a metric are compared."""
    if unit == "dB":
        return Scale.DECIBEL
    if metric == LATENCY_TAIL:
        return Scale.TAIL
    if unit == "1":
        figure = figure_of(metric)
        return Scale.COSINE if figure is not None and figure.near_one else Scale.SHARE
    counter = counter_of(metric)
    return Scale.BYTES if counter is not None and counter.signed else Scale.RATIO


def is_on_scale(scale: Scale, value: float) -> bool:
    """Return whether `scaled` has a number for `value`, and not NaN."""
    return not (math.isnan(value) or (scale is Scale.RATIO and value < 0.0))


def scaled(scale: Scale, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return numbers whose differences are changes on `scale`, one for each value.

    A negative value has no ratio: NaN. Zero is -inf there; an SQNR of equal outputs stays inf.
    """
    # Commands that only read the store need the names of scales, but not NumPy, which takes 0.1 s to load.
    import numpy as np

    array = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        if scale is Scale.RATIO:
            return np.log(array)
        if scale is Scale.COSINE:
            return -10.0 * np.log10(np.maximum(1.0 - array, _LEAST_DISTANCE))
    return array


def unscaled(scale: Scale, number: float) -> float:
    """Return the value that `scaled` makes `number` of."""
    if scale is Scale.RATIO:
        try:
            return math.exp(number)
        except OverflowError:
            return math.inf
    return 1.0 - 10.0 ** (-number / 10.0) if scale is Scale.COSINE else number


def change_text(scale: Scale, change: float) -> str:
    """Return a change on `scale` for people: `+8.2 %`, `-0.7 dB`, `-0.012`."""
    if scale is Scale.RATIO:
        return f"{100.0 * (unscaled(scale, change) - 1.0):+.1f} %"
    if scale is Scale.BYTES:
        return f"{change:+,.0f} bytes"
    if scale is Scale.TAIL:
        return f"{100.0 * change:+.0f} % of the median"
    return f"{change:+.3g}" if scale is Scale.SHARE else f"{change:+.1f} dB"
