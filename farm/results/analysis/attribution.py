"""Step 3: attribution of a change to its first bad run and to a factor. Pure: docs/explanation/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.results.analysis.confirmation import Answer, Confirmation
from farm.results.analysis.statistics import GATES, LEAST_SIGMA, Scale, change_text, level_sigma, scaled

# Step 3: which run was the first bad one? Few old bundles are run again. Pure: docs/explanation/statistics.md.


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


# Step 3: attribution of a change, from comparisons that swap one factor each.
#
# Pure. Reasons: docs/explanation/statistics.md.


class Factor(StrEnum):
    """Factor that can be swapped alone between the last good run and the first bad one."""

    PROGRAM = "program"
    """The bundle's `.pte`."""
    RUNTIME = "runtime"
    """The runner."""
    SDK = "sdk"
    """QNN's libraries and skel."""


class AttributionKind(StrEnum):
    """Result of all swaps together."""

    FACTOR = "axis"
    """A single factor explains the change."""
    SEVERAL = "several"
    """More than one do, each a part of it."""
    INTERACTION = "interaction"
    """Only together: the factors by themselves leave over more than chance, and all that differ were swapped."""
    UNEXPLAINED = "unexplained"
    """The measurements give no explanation."""
    NOTHING = "nothing"
    """There is no change to explain."""


class Explanation(msgspec.Struct, frozen=True):
    """Factors that explain a change, and the unexplained rest. Changes are on the scale of the series."""

    kind: AttributionKind
    causes: tuple[Factor, ...]
    """The greatest effect first."""
    rest: float
    """Part of the whole change without the single factors; NaN without a swap."""
    reason: str
    """Reason in one line."""


def explain(
    scale: Scale, whole: Confirmation, alone: Mapping[Factor, Confirmation], differing: Collection[Factor]
) -> Explanation:
    """Return the factors that explain a change.

    `whole` compares all old with all new; `alone` compares all old with one factor swapped; `differing` has the factors
    that differ. All come from one device and `confirm`. An effect up to the gate of `scale` counts as none.

    A change is attributed to a factor whose interval excludes 0 and whose effect is beyond the gate, either way. The
    rest counts if its interval, from all measured ones, excludes 0 and the rest is beyond the gate.
    """
    gate = GATES[scale].confirmed
    if whole.answer is Answer.REFUTED or max(abs(whole.low), abs(whole.high)) < gate:
        return _without(AttributionKind.NOTHING, "the whole change is none")
    if not _is_there(whole.change, whole.low, whole.high, gate):
        return _without(AttributionKind.UNEXPLAINED, "the whole change is not certain: measure more pairs")
    effects = {factor: one for factor, one in alone.items() if one.pairs}
    if not effects:
        return _without(AttributionKind.UNEXPLAINED, "no factor was swapped by itself")
    by_effect = sorted(effects.items(), key=lambda item: -abs(item[1].change))
    causes = tuple(factor for factor, one in by_effect if _is_there(one.change, one.low, one.high, gate))
    rest = whole.change - sum(one.change for one in effects.values())
    # Independent measurements: their half widths add as squares do.
    half = math.hypot(*((one.high - one.low) / 2.0 for one in (whole, *effects.values())))
    missing = sorted(set(differing) - effects.keys())
    kind, reason = _kind(causes, missing, is_left=_is_there(rest, rest - half, rest + half, gate))
    shown = "; ".join(
        f"{factor} {change_text(scale, one.change)} ({change_text(scale, one.low)} to {change_text(scale, one.high)})"
        for factor, one in by_effect
    )
    reason = f"{reason}: {shown}; of {change_text(scale, whole.change)} in all {change_text(scale, rest)} left over"
    return Explanation(kind, causes, rest, reason)


def _kind(causes: tuple[Factor, ...], missing: list[Factor], *, is_left: bool) -> tuple[AttributionKind, str]:
    if is_left and missing:
        return AttributionKind.UNEXPLAINED, f"{' and '.join(missing)} not swapped by itself"
    if is_left:
        return AttributionKind.INTERACTION, "only together, or something that is no factor"
    if not causes:
        return AttributionKind.UNEXPLAINED, "no factor has an effect, and nothing is certain to be left over"
    return (AttributionKind.FACTOR if len(causes) == 1 else AttributionKind.SEVERAL), " and ".join(causes)


def _is_there(change: float, low: float, high: float, gate: float) -> bool:
    """Return whether a change is beyond the gate, and its interval (low, high) leaves out 0."""
    return abs(change) > gate and (low > 0.0 or high < 0.0)


def _without(kind: AttributionKind, reason: str) -> Explanation:
    return Explanation(kind, (), math.nan, reason)
