"""Factors swapped one at a time: is a change the program's, the runner's or the SDK's?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.numbers.regressions.paired_test import compare, sides_of
from farm.results.analysis.confirmation import INFERENCES, PAIRS, Confirmation
from farm.results.analysis.factors import Explanation, Factor, explain

if TYPE_CHECKING:
    from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
    from farm.numbers.regressions.paired_test import Claim, Compared
    from farm.replay.stored_result import StoredResult

_FACTS = {Factor.RUNTIME: ("native_runner",), Factor.SDK: ("qnn", "skel")}
"""Facts of a runtime by factor."""


class Attribution(msgspec.Struct, frozen=True):
    """Attribution of a change with its measurements."""

    metric: str
    explanation: Explanation
    whole: Confirmation
    """All old against all new."""
    alone: dict[Factor, Confirmation]
    """All old against all old but one."""
    differing: tuple[Factor, ...]
    not_swapped: dict[Factor, str]
    """Factors that are not the same in both runs and could not be swapped here, and why."""


class Swaps(msgspec.Struct, frozen=True):
    """Factors that can be swapped between two runs on a bench."""

    old: Side
    new: Side
    """All that can be had, as in the new run."""
    alone: dict[Factor, Side]
    """All old but for one factor."""
    not_swapped: dict[Factor, str]

    @property
    def differing(self) -> tuple[Factor, ...]:
        """Factors that differ between the runs."""
        return tuple(factor for factor in Factor if factor in self.alone or factor in self.not_swapped)


def plan_swaps(bench: InterleavedBench, good: StoredResult, new: StoredResult) -> Swaps:
    """Return what can be swapped. Raises UsageError for a bundle that is gone."""
    old, now, left = sides_of(bench, good, new)
    alone: dict[Factor, Side] = {}
    refused: dict[Factor, str] = {}
    for factor, names in _FACTS.items():
        if all(good.facts.get(name) == new.facts.get(name) for name in names):
            continue
        if left:
            refused[factor] = f"the runtime of run {good.run.id} or {new.run.id} is no longer in the cache"
        elif (runtime := bench.mixed(*((old, now) if factor is Factor.RUNTIME else (now, old)))) is None:
            refused[factor] = "the runners of the two runs take different jobs"
        else:
            alone[factor] = msgspec.structs.replace(old, runtime=runtime)
    if good.attempt.bundle_key != new.attempt.bundle_key:
        alone[Factor.PROGRAM] = msgspec.structs.replace(old, bundle=now.bundle, job=now.job)
    return Swaps(old, now, alone, refused)


def swap_factors(
    bench: InterleavedBench,
    claim: Claim,
    swaps: Swaps,
    pairs: int = PAIRS,
    inferences: int = INFERENCES,
    *,
    program: Compared | None = None,
) -> Attribution:
    """Swap each factor that differs by itself, and name the factors that explain the change of a series.

    `program` is the result of the two bundles on the runtime of the bench: without another factor to swap it is the
    whole answer, and no pairs are measured. Raises as `compare`.
    """

    def against_old(side: Side) -> Confirmation:
        return compare(bench, [claim], swaps.old, side, pairs, inferences, fresh=True)[0].confirmation

    if program is not None and swaps.alone.keys() <= {Factor.PROGRAM}:
        whole = program.confirmation
        alone = dict.fromkeys(swaps.alone, whole)
    else:
        whole = against_old(swaps.new)
        # With one factor, all new is all old but that one.
        single = len(swaps.alone) == 1
        alone = {factor: whole if single else against_old(side) for factor, side in swaps.alone.items()}
    explanation = explain(claim.series.scale, whole, alone, swaps.differing)
    return Attribution(claim.series.metric, explanation, whole, alone, swaps.differing, swaps.not_swapped)
