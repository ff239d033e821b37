"""Statistics that a few wild values do not move, and scales that compare two values of a metric: ratio, dB or
difference.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from farm.results.attempt import Direction
from farm.suites.figures import LATENCY_TAIL, counter_of, figure_of, is_host_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


# Statistics that a few wild values do not move, and that infinities do not break.
#
# NumPy, which takes 0.1 s to load, is imported by the functions that need it: young series are judged without it.


NORMAL = 1.4826
"""So many times its median absolute deviation (MAD) is the standard deviation of a normal distribution."""

# The median of n normal values varies by sqrt(pi / 2 / n) standard deviations, for large n.
_MEDIAN_VARIANCE = math.pi / 2
# A MAD of n values knows as much as a standard deviation of 0.37 n.
_MAD_EFFICIENCY = 0.37


def median_and_mad(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return the median and the median absolute deviation from it; equal infinities do not deviate.

    NaN where opposite infinities meet in the middle.
    """
    import numpy as np

    middle, numbers = median(values), np.asarray(values)
    with np.errstate(invalid="ignore"):
        deviations = np.where(numbers == middle, 0.0, np.abs(numbers - middle))
    return middle, median(deviations)


def median(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the median of at least one value, none of them NaN."""
    import numpy as np

    # np.median takes ten times as long for the few values that there are, and it is asked for every series.
    ordered = np.sort(values)
    low, high = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    # Halves, as the sum of two great numbers may be infinite.
    return low if low == high else low / 2.0 + high / 2.0


def medians(samples: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the median of each array, NaN for an empty one or one with NaN."""
    import numpy as np

    found = [median(one) if len(one) and not np.isnan(one).any() else math.nan for one in samples]
    return np.array(found, np.float64)


def difference(new: float, old: float) -> float:
    """Return `new - old`; 0 where both are the same infinity."""
    return 0.0 if new == old else new - old


def sigma_of_next(mad: float, count: int) -> float:
    """Return the standard deviation of a next value from the median of `count` values with this MAD."""
    return NORMAL * mad * math.sqrt(1.0 + _MEDIAN_VARIANCE / count)


def level_sigma(values: NDArray[np.float64], least: float) -> float:
    """Return the standard deviation of `values` around their level, at least `least`; steps do not count."""
    import numpy as np

    if len(values) < 2:
        return least
    # Differences of neighbours see a step once.
    return max(least, NORMAL * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2.0))


def p_of_next(sigmas: float, count: int) -> float:
    """Return how probable a next value is as far off as so many sigmas, either way, by chance alone.

    `sigmas` are of `sigma_of_next`: Student's distribution with 0.37 `count` degrees of freedom has their quantiles.
    Infinite ones are of a history that repeats to the bit: of n + 1 equal chances, this was the one.
    """
    if math.isinf(sigmas):
        return 1.0 / (count + 1)
    return _beyond(abs(float(sigmas)), _MAD_EFFICIENCY * count)


def _beyond(distance: float, freedom: float) -> float:
    """Return the probability of Student's distribution with `freedom` degrees beyond `distance`, either way, to 1e-12.

    With the distance as a tangent, the density is a power of a sine, which is integrated by Gauss's rule. Our own code
    saves the load time of SciPy, which has no other use here.
    """
    import numpy as np

    nodes, weights = _gauss_rule()
    # Greater distances would make the powers of the smallest angles zero.
    places, angle = (nodes + 1.0) / 2.0, math.atan2(math.sqrt(freedom), min(distance, 1e200))
    # Places are dense near zero, where the power of the sine is not smooth.
    power = 1.0 + 12.0 / freedom
    inside = weights @ (places ** (power - 1.0) * np.sin(angle * places**power) ** (freedom - 1.0))
    gammas = math.lgamma((freedom + 1.0) / 2.0) - math.lgamma(freedom / 2.0)
    return min(1.0, power * angle * float(inside) * math.exp(gammas) / math.sqrt(math.pi))


@lru_cache(1)
def _gauss_rule() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    import numpy as np

    return np.polynomial.legendre.leggauss(64)


def signed_rank_p(differences: NDArray[np.float64]) -> float:
    """Return the p-value of Wilcoxon's signed-rank test that `differences` lie above zero.

    The test is one-sided and exact without ties. A zero, and a tie of two signs, count against the claim, so that a
    greater difference never has a greater p-value: the rank sum is the number of Walsh averages above zero (Tukey).
    """
    import numpy as np

    if not len(differences):
        return 1.0
    ways = _ways(range(1, len(differences) + 1))
    return float(ways[int(np.count_nonzero(_walsh(differences) > 0.0)) :].sum() / ways.sum())


def middle_of_pairs(differences: NDArray[np.float64], confidence: float) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the middle of `differences`, and its interval, low and high.

    The estimate is the median of all Walsh averages, (a + b) / 2; the interval belongs to the signed-rank test, exact
    without ties. Infinite differences would make most averages infinite: with any, the estimate is the median of the
    differences, and the interval belongs to the sign test. Too few differences for `confidence` have an infinite
    interval. At least one difference is required.
    """
    import numpy as np

    tail = (1.0 - confidence) / 2.0
    if np.isfinite(differences).all():
        ordered, ways = _walsh(differences), _ways(range(1, len(differences) + 1))
    else:
        ordered, ways = np.sort(differences), _ways((1,) * len(differences))
    outside = int(np.searchsorted(np.cumsum(ways) / ways.sum(), tail, side="right"))
    middle = median(ordered)
    # Infinities of both signs leave nothing in the middle.
    estimate = 0.0 if math.isnan(middle) else middle
    if not outside:
        return estimate, -math.inf, math.inf
    return estimate, float(ordered[outside - 1]), float(ordered[-outside])


def discoveries(p_values: Sequence[float], rate: float) -> tuple[bool, ...]:
    """Return which `p_values` count, such that on average at most `rate` of them are chance.

    Benjamini and Hochberg: the k smallest, for the greatest k with `p_k <= rate k / n`.
    """
    import numpy as np

    ordered = np.sort(np.asarray(p_values, np.float64))
    enough = ordered[ordered <= rate * np.arange(1, len(ordered) + 1) / len(ordered)]
    greatest = float(enough.max(initial=-1.0))
    return tuple(p_value <= greatest for p_value in p_values)


def _walsh(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    first, second = np.triu_indices(len(differences))
    with np.errstate(invalid="ignore"):
        averages = differences[first] / 2.0 + differences[second] / 2.0
    # Opposite infinities are neither above zero nor below.
    averages[np.isnan(averages)] = 0.0
    return np.sort(averages)


@lru_cache(64)
def _ways(ranks: Sequence[int]) -> NDArray[np.float64]:
    """Return how many choices of `ranks` have each sum, from 0 on: not to be changed."""
    import numpy as np

    ways = np.ones(1)
    for rank in ranks:
        # Every rank is in the sum or is not.
        ways = np.convolve(ways, np.isin(np.arange(rank + 1), (0, rank)))
    return ways


# How two values of a metric are compared: as a ratio, in dB, or by their difference; and from where on it matters.


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
