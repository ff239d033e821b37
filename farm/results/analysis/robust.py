"""Statistics that a few wild values do not move, and that infinities do not break.

NumPy, which takes 0.1 s to load, is imported by the functions that need it: young series are judged without it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

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
    """Return the median of each array, NaN for an empty one or one with NaN; computed together for speed."""
    import numpy as np

    found = np.full(len(samples), math.nan)
    by_count: dict[int, list[int]] = {}
    for place, one in enumerate(samples):
        by_count.setdefault(len(one), []).append(place)
    for count, places in by_count.items():
        if count:
            # NaN is sorted to the end.
            rows = np.sort(np.array([samples[place] for place in places]), axis=1)
            low, high = rows[:, (count - 1) // 2], rows[:, count // 2]
            with np.errstate(invalid="ignore"):
                middle = np.where(low == high, low, low / 2.0 + high / 2.0)
            found[places] = np.where(np.isnan(rows[:, -1]), math.nan, middle)
    return found


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
    """Return the probability of Student's distribution with `freedom` degrees beyond `distance`, either way.

    The value is the regularized incomplete beta function I_x(freedom / 2, 1 / 2) at x = freedom / (freedom +
    distance^2), to 1e-12. Our own code saves the load time of SciPy, which has no other use here.
    """
    square = distance * distance
    x, rest = freedom / (freedom + square), square / (freedom + square) if square < math.inf else 1.0
    if x == 0.0 or rest == 0.0:
        return 1.0 if rest == 0.0 else 0.0
    a, b = freedom / 2.0, 0.5
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) / (a * _fraction(x, a, b))
    return 1.0 - math.exp(log_front) / (b * _fraction(rest, b, a))


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    value = ratio = 1.0
    inverse = 0.0
    for step in range(1, 200):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        inverse = 1.0 / (1.0 + term * inverse)
        ratio = 1.0 + term / ratio
        value *= ratio * inverse
        if abs(ratio * inverse - 1.0) < 1e-15:
            break
    return value


def signed_rank_p(differences: NDArray[np.float64]) -> float:
    """Return the p-value of Wilcoxon's signed-rank test that `differences` lie above zero.

    The test is one-sided and exact without ties. A zero, and a tie of two signs, count against the claim, so that a
    greater difference never has a greater p-value: the rank sum is the number of Walsh averages above zero (Tukey).
    """
    import numpy as np

    if not len(differences):
        return 1.0
    ways = _ways_of_ranks(len(differences))
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
        ordered, ways = _walsh(differences), _ways_of_ranks(len(differences))
    else:
        ordered, ways = np.sort(differences), _ways(np.ones(len(differences), np.int64))
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

    order = np.argsort(np.asarray(p_values, np.float64), kind="stable")
    count, kept = len(p_values), 0
    for rank, index in enumerate(order, 1):
        if p_values[index] <= rate * rank / count:
            kept = rank
    chosen = {int(index) for index in order[:kept]}
    return tuple(index in chosen for index in range(count))


def _walsh(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    first, second = _upper(len(differences))
    with np.errstate(invalid="ignore"):
        averages = differences[first] / 2.0 + differences[second] / 2.0
    # Opposite infinities are neither above zero nor below.
    averages[np.isnan(averages)] = 0.0
    return np.sort(averages)


@lru_cache(64)
def _upper(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    import numpy as np

    return np.triu_indices(count)


@lru_cache(64)
def _ways_of_ranks(count: int) -> NDArray[np.float64]:
    """Return how many choices of the ranks from 1 to `count` have each sum: not to be changed."""
    import numpy as np

    return _ways(np.arange(1, count + 1))


def _ways(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many choices of `ranks` have each sum, from 0 on."""
    import numpy as np

    ways = np.ones(1)
    for rank in ranks:
        # Every rank is in the sum or is not.
        longer = np.zeros(len(ways) + int(rank))
        longer[: len(ways)] += ways
        longer[int(rank) :] += ways
        ways = longer
    return ways
