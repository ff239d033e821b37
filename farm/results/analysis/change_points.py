"""Step 3: where in a history does a level begin? Pure: docs/explanation/statistics.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from farm.results.analysis.statistics import GATES, LEAST_SIGMA, Scale, level_sigma, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    _Places = NDArray[np.int64] | int

LEAST_LEVEL = 3
"""Fewest runs of a level: fewer are outliers."""

# A change point has to explain that many times log(n) in squared standard deviations.
_PENALTY = 5.0
# A value further from its neighbours than that many standard deviations counts as if it were that far off.
_OUTLIER = 3.0
_NEIGHBOURS = 2
# The squares of greater values would be infinite.
_GREATEST = 1e12


class ChangePoint(msgspec.Struct, frozen=True):
    """Boundary between two levels."""

    index: int
    """Most likely index of the first value of the new level."""
    change: float
    """Change between the medians of the levels before and after, on the scale."""


def change_points(scale: Scale, values: Sequence[float]) -> tuple[ChangePoint, ...]:
    """Return the changes of level in `values`, oldest first; values that are not finite, or beyond 1e12, are skipped.

    The sum of squared distances from the level's mean, in robust standard deviations and with outliers pulled in,
    plus a penalty for each level, is least for these levels: all ways to cut are compared (O(n^2)).
    """
    if len(values) < 2 * LEAST_LEVEL:
        return ()
    import numpy as np

    numbers = scaled(scale, values)
    where = np.flatnonzero(np.abs(numbers) < _GREATEST)
    numbers = numbers[where]
    if len(numbers) < 2 * LEAST_LEVEL:
        return ()
    cost = _costs(_winsorized(numbers, scale))
    ends = [0, *_best_cuts(cost, len(numbers)), len(numbers)]
    found = []
    for begin, _, end in zip(ends, ends[1:], ends[2:], strict=False):
        # A level that is younger than the least one may have begun after where it could be cut.
        places = np.arange(begin + 1, end)
        most = int(places[np.argmin(cost(begin, places) + cost(places, end))])
        change = float(np.median(numbers[most:end]) - np.median(numbers[begin:most]))
        found.append(ChangePoint(int(where[most]), change))
    return tuple(found)


def _costs(values: NDArray[np.float64]) -> Callable[[_Places, _Places], NDArray[np.float64]]:
    """Return the function for the sum of squared distances from the mean, from one index to before another."""
    import numpy as np

    sums, squares = (np.concatenate(([0.0], np.cumsum(one))) for one in (values, values * values))

    def cost(begin: _Places, end: _Places) -> NDArray[np.float64]:
        total = sums[end] - sums[begin]
        return np.asarray(squares[end] - squares[begin] - total * total / (end - begin))

    return cost


def _winsorized(numbers: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    """Return them in standard deviations, with outliers no further than three from the median of five neighbours."""
    import numpy as np

    sigma = level_sigma(numbers, LEAST_SIGMA * GATES[scale].change)
    padded = np.pad(numbers, _NEIGHBOURS, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1), axis=1)
    calm = np.clip(numbers, middle - _OUTLIER * sigma, middle + _OUTLIER * sigma)
    # Around zero, so that sums of squares lose no digits.
    return np.asarray((calm - np.median(calm)) / sigma)


def _best_cuts(cost: Callable[[_Places, _Places], NDArray[np.float64]], count: int) -> list[int]:
    import numpy as np

    penalty = _PENALTY * math.log(count)
    best = np.full(count + 1, np.inf)
    best[0] = -penalty
    came_from = np.zeros(count + 1, np.int64)
    for end in range(LEAST_LEVEL, count + 1):
        begins = np.arange(end - LEAST_LEVEL + 1)
        totals = best[begins] + cost(begins, end) + penalty
        came_from[end] = np.argmin(totals)
        best[end] = totals[came_from[end]]
    cuts: list[int] = []
    end = int(came_from[count])
    while end:
        cuts.insert(0, end)
        end = int(came_from[end])
    return cuts
