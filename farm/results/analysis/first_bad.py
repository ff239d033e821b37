"""Step 3: which run was the first bad one? Few old bundles are run again. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.results.analysis.confirmation import Answer
from farm.results.analysis.robust import level_sigma
from farm.results.analysis.scale import GATES, LEAST_SIGMA, Scale, scaled

MOST_PROBES = 8
"""Most old bundles that are run again for one step."""

# A run further off than that many standard deviations counts as if it were that far off.
_OUTLIER = 3.0


class Bracket(msgspec.Struct, frozen=True):
    """Bounds of a step: indices into the runs of a series, oldest first."""

    good: int
    """The newest run that is known to be good."""
    bad: int
    """The oldest that is known to be bad."""
    open: frozenset[int] = frozenset()
    """Runs in between without an answer: their bundle is gone, or pairs left it unknown."""

    @property
    def exact(self) -> bool:
        """True if no run lies between the bounds."""
        return self.bad == self.good + 1


def suspicion(scale: Scale, values: Sequence[float], bracket: Bracket, change: float) -> NDArray[np.float64]:
    """Return how credible each run is as the first bad one, in all 1, from the history alone; one for each value.

    `change` is the confirmed step, on `scale`. Runs outside of the bracket have 0.
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
    """Return the run between good and bad whose bundle halves what `weights` (of `suspicion`) leave open.

    None where none that could decide is left.
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
    """Return the bracket after `probe` was compared with a good bundle, best with half the step as the gate."""
    if answer is Answer.CONFIRMED:
        return msgspec.structs.replace(bracket, bad=probe)
    if answer is Answer.REFUTED:
        return msgspec.structs.replace(bracket, good=probe)
    return msgspec.structs.replace(bracket, open=bracket.open | {probe})


def _loss(values: NDArray[np.float64], sigma: float) -> float:
    """Return half the sum of squared distances from one level, in standard deviations; NaN is left out."""
    if np.isnan(values).all():
        return 0.0
    distances = np.minimum(np.abs(values - np.nanmedian(values)) / sigma, _OUTLIER)
    return float(np.nansum(distances * distances)) / 2.0
