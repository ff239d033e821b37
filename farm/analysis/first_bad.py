"""Step 3: which run was the first bad one? Old bundles are run again, few of them. Pure: docs/regressions.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.analysis.confirmation import Answer
from farm.analysis.robust import level_sigma
from farm.analysis.scale import GATES, LEAST_SIGMA, Scale, scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MOST_PROBES = 8
"""So many old bundles are run again for one step, at most."""

# A run that is further off than so many standard deviations tells no more than one that is so far.
_OUTLIER = 3.0


class Bracket(msgspec.Struct, frozen=True):
    """What is known of a step: indices into the runs of a series, oldest first."""

    good: int
    """The newest run that is known to be good."""
    bad: int
    """The oldest that is known to be bad."""
    open: frozenset[int] = frozenset()
    """Runs in between that cannot tell: their bundle is gone, or pairs left it unknown."""

    @property
    def exact(self) -> bool:
        """Tell whether nothing is in between."""
        return self.bad == self.good + 1


def suspicion(scale: Scale, values: Sequence[float], bracket: Bracket, change: float) -> NDArray[np.float64]:
    """Return how credible each run is as the first bad one, in all 1, from the history alone; one for each value.

    `change` is what pairs said of the step, on `scale`. Runs outside of the bracket have 0.
    """
    numbers = scaled(scale, values)
    runs = np.arange(bracket.good, bracket.bad + 1)
    seen = numbers[runs]
    seen = np.where(np.isfinite(seen), seen, np.nan)
    sigma = level_sigma(seen[~np.isnan(seen)], LEAST_SIGMA * GATES[scale].change)
    # With the right one as the first bad run, and the step taken out of it and of all after it, one level is left.
    losses = np.array([_loss(seen - change * (runs >= first), sigma) for first in runs[1:]])
    weights = np.zeros(len(numbers))
    weights[runs[1:]] = np.exp(losses.min() - losses)
    return np.asarray(weights / weights.sum())


def next_probe(bracket: Bracket, weights: NDArray[np.float64]) -> int | None:
    """Return which run's bundle to run again, None when it is known which is the first bad one, or nobody can tell.

    It is the run that halves what `weights` (of `suspicion`) leave open.
    """
    choices = [run for run in range(bracket.good + 1, bracket.bad) if run not in bracket.open]
    if not choices:
        return None
    within = weights[bracket.good + 1 : bracket.bad + 1]
    total = float(within.sum())
    # A run is bad when it, or one before it, is the first bad one.
    if total > 0.0:
        chance = {run: float(weights[bracket.good + 1 : run + 1].sum()) / total for run in choices}
    else:
        chance = {run: (run - bracket.good) / (bracket.bad - bracket.good) for run in choices}
    return min(choices, key=lambda run: (abs(chance[run] - 0.5), run))


def narrowed(bracket: Bracket, probe: int, answer: Answer) -> Bracket:
    """Return what is known after `probe` was compared with a good bundle: confirmed is bad, refuted is good.

    The comparison's gate is best half the step: what is nearer to the bad level is bad.
    """
    if answer is Answer.CONFIRMED:
        return msgspec.structs.replace(bracket, bad=probe)
    if answer is Answer.REFUTED:
        return msgspec.structs.replace(bracket, good=probe)
    return msgspec.structs.replace(bracket, open=bracket.open | {probe})


def _loss(values: NDArray[np.float64], sigma: float) -> float:
    """Return how far they are from one level, in half squared standard deviations; NaN tells nothing."""
    if np.isnan(values).all():
        return 0.0
    distances = np.minimum(np.abs(values - np.nanmedian(values)) / sigma, _OUTLIER)
    return float(np.nansum(distances * distances)) / 2.0
