"""Pairs of old and new bundles until a claim is decided, and its factors: docs/explanation/statistics.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from farm.base.errors import FarmError, NoHistoryError, UnknownNameError, UsageError
from farm.base.text import reason_line
from farm.dispatch.history_comparison import TEXT_RATES, TIMES
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.replay.stored_result import StoredResult
from farm.results.analysis.attribution import (
    MOST_PROBES,
    Bracket,
    Explanation,
    Factor,
    explain,
    narrowed,
    next_probe,
    suspicion,
)
from farm.results.analysis.confirmation import (
    INFERENCES,
    P_CONFIRMED,
    PAIRS,
    Answer,
    Confirmation,
    Pair,
    add_pairs,
    confirm,
    confirmed_again,
    plan_looks,
    steady_inferences,
    unsure,
)
from farm.results.analysis.history import runtime_changes
from farm.results.analysis.statistics import GATES, Series
from farm.results.attempt import Direction
from farm.suites.figures import LATENCY_TAIL, LEAST_OF_TAIL, PEAK_MEMORY

# Pairs of old bundles and new ones, measured until a claim is decided: docs/explanation/statistics.md.


MeasuredPairs = dict[tuple[object, ...], dict[str, list["Pair"]]]
"""Pairs by metric of sides in shared processes or new ones: what one claim had measured, others need not again."""


class Claim(NamedTuple):
    """A series, and the direction that it is claimed to have moved."""

    series: Series
    up: bool
    base: float = 0.0
    """Known change from the good side, beyond which the claim is."""


class Compared(msgspec.Struct, frozen=True):
    """Result of pairs on a claim."""

    series: Series
    confirmation: Confirmation
    pairs: tuple[Pair, ...]
    """Samples of good and new."""
    left: str = ""
    """Differences of what executed both results that the pairs could not have; empty for none."""


class Probe(msgspec.Struct, frozen=True):
    """An old run, compared with the good one."""

    number: int
    """Index of the run."""
    confirmation: Confirmation | None
    """Confirmation; None for a pruned bundle, and for a bundle that was compared already."""
    answer: Answer
    reason: str
    """Reason in one line."""


def series_of(good: StoredResult, new: StoredResult, metrics: Sequence[str] = ()) -> list[Series]:
    """Return common series of both results: the named ones, or the most informative time.

    Raises UnknownNameError, and UsageError for metrics that pairs do not measure.
    """
    known = {one.metric: one for one in new.attempt.measurements}
    both = {one.metric for one in good.attempt.measurements} & known.keys()
    for past in (good, new):
        if not past.attempt.measurements:
            raise NoHistoryError(f"{new.view.id} has no numbers in run {past.run.id}: {past.attempt.reason}")
    wanted = list(dict.fromkeys(metrics)) or [
        *[one for one in TIMES if one in both][:1],
        *[one for one in TEXT_RATES if one in both],
    ]
    if not wanted:
        raise UsageError(f"the results of {new.view.id} have no time in common: name what to compare with --metric")
    found = []
    for metric in wanted:
        if metric not in both:
            raise UnknownNameError("metric", metric, both, f"of both results of {new.view.id}")
        one = known[metric]
        if one.exact:
            raise UsageError(
                f"{metric} is deterministic, so that any change is one: 'farm diff {good.run.id} {new.run.id}' "
                "shows it, without pairs"
            )
        found.append(Series(new.view.id, metric, one.unit, one.direction))
    return found


def worse(series: Series) -> Claim:
    """Return the claim that a series got worse."""
    return Claim(series, up=series.direction is not Direction.HIGHER)


def compare(
    bench: InterleavedBench,
    claims: Sequence[Claim],
    good: StoredResult | Side,
    new: StoredResult | Side,
    pairs: int = PAIRS,
    inferences: int = INFERENCES,
    *,
    gate: float | None = None,
    level: float = P_CONFIRMED,
    first_level: float = 1.0,
    early: bool = False,
    fresh: bool = False,
    measured: MeasuredPairs | None = None,
) -> list[Compared]:
    """Measure pairs, doubled once while a claim is unknown, and return the result of each claim.

    Confirmed times are confirmed once more, with new processes in every turn, and get the size from these pairs; with
    `fresh` all pairs are of that kind, once. `gate` is on the scale of the series, `level` the bound of p-values, and
    `first_level` the bound in the first half. `early` ends as soon as no claim can hold. `measured` has pairs of these
    sides measured just before, and receives the new ones. A side that crashes or has wrong numbers makes the claim
    unknown. Raises InfraError for trouble of farm and device, UsageError for a pruned bundle.
    """
    was, now, left = sides_of(bench, good, new)
    numerics = any(claim.series.of_outputs for claim in claims)
    since = len(bench.turns)
    found: dict[str, list[Pair]] = {}
    compared: list[Compared] = []
    measured = {} if measured is None else measured
    # The peak memory of a process that runs both sides belongs to both.
    of_process = any(claim.series.metric == PEAK_MEMORY for claim in claims)
    fresh = fresh or was.place != now.place or now.heap or of_process

    def enough() -> int:
        least = LEAST_OF_TAIL if any(one.series.metric == LATENCY_TAIL for one in claims) else inferences
        known = (found.get(one.series.metric, []) for one in claims if not one.series.of_outputs)
        took = [one for good, _ in known_pairs(fresh=fresh).get("latency", ()) for one in good]
        latency_ns = statistics.median(took) if took else 0.0
        return max(least, *(steady_inferences(one, inferences, latency_ns) for one in known), inferences)

    def known_pairs(*, fresh: bool) -> dict[str, list[Pair]]:
        return measured.setdefault((was.key, now.key, fresh), {})

    def pairs_of(begin: int, count: int, *, renew: bool, fresh: bool) -> dict[str, list[Pair]]:
        """Return pairs by metric; pairs known for all claims are not measured again."""
        known, there = known_pairs(fresh=fresh), slice(begin, begin + count)
        if not all(_whole(known.get(one.series.metric, [])[there])[count - 1 :] for one in claims):
            more = bench.measure(was, now, count, enough(), numerics=numerics, begin=begin, renew=renew, fresh=fresh)
            for metric, some in more.items():
                of_metric = known.setdefault(metric, [])
                add_pairs(of_metric, begin, ())
                of_metric[there] = some
            return more
        return {metric: some[there] for metric, some in known.items()}

    for look in plan_looks(pairs, early=early):
        for metric, more in pairs_of(look.begin, look.pairs, renew=look.renews, fresh=fresh).items():
            add_pairs(found.setdefault(metric, []), look.begin, more)
        if not found:
            break
        needed = min(level, first_level) if look.looks == 1 else level
        compared = [_compared(claim, found, gate, needed, look.looks) for claim in claims]
        if all(one.confirmation.answer is not Answer.UNKNOWN for one in compared):
            break
    compared = compared or [_compared(claim, found, gate, level, 1) for claim in claims]
    if not fresh and any(_needs_again(one) for one in compared):
        again = pairs_of(0, PAIRS, renew=False, fresh=True)
        compared = [
            _compared_again(claim, one, again, gate) if _needs_again(one) else one
            for claim, one in zip(claims, compared, strict=True)
        ]
    problems = bench.problems(was, now, since=since)
    return [_with_left(_with_problem(one, problems), left) for one in compared]


def sides_of(bench: InterleavedBench, good: StoredResult | Side, new: StoredResult | Side) -> tuple[Side, Side, str]:
    """Return both sides, each with its own runtime, and an empty text.

    If a runtime is gone, both have the runtime of the bench, and the text names the factors not compared.
    """
    was, now = (bench.side(one) if isinstance(one, StoredResult) else one for one in (good, new))
    if not (isinstance(good, StoredResult) and isinstance(new, StoredResult)) or (was.is_whole and now.is_whole):
        return was, now, ""
    was, now = (msgspec.structs.replace(one, runtime=None) for one in (was, now))
    return was, now, runtime_changes(good.facts, new.facts)


def first_bad(
    bench: InterleavedBench,
    series: Series,
    runs: Sequence[StoredResult | None],
    values: Sequence[float],
    bracket: Bracket,
    change: float,
    pairs: int = PAIRS,
    inferences: int = INFERENCES,
    *,
    on_probe: Callable[[Probe], None] = lambda _: None,
    measured: MeasuredPairs | None = None,
) -> Bracket:
    """Narrow the runs among which the first bad one is, by running old bundles in pairs with the good one's.

    `runs` and `values` belong to the comparable runs, oldest first; None for a pruned bundle. `change` is the confirmed
    step: runs nearer to its far side are bad. At most MOST_PROBES bundles are run; a known bundle costs none.
    `on_probe` is called for each. Raises as `compare`.
    """
    good = runs[bracket.good]
    if good is None:
        raise NoHistoryError("the good run's bundle is gone: nothing can be compared with it")
    claim = Claim(series, change > 0)
    answers = {good.side: Answer.REFUTED}
    bad = runs[bracket.bad]
    if bad is not None:
        answers.setdefault(bad.side, Answer.CONFIRMED)
    # An infinite change means that equal outputs now differ: the history has no weights, and any difference counts.
    finite = math.isfinite(change)
    weights = suspicion(series.scale, values, bracket, change) if finite else np.zeros(len(values))
    gate = abs(change) / 2.0 if finite else GATES[series.scale].confirmed

    def measured_probe(number: int, past: StoredResult) -> Probe:
        try:
            bench.side(past)
        except FarmError as error:
            return Probe(number, None, Answer.UNKNOWN, reason_line(str(error)))
        effort = pairs, inferences
        [one] = compare(bench, [claim], good, past, *effort, gate=gate, early=True, fresh=True, measured=measured)
        return Probe(number, one.confirmation, one.confirmation.answer, one.confirmation.reason)

    probes = 0
    while (number := next_probe(bracket, weights)) is not None:
        past = runs[number]
        if past is None:
            probe = Probe(number, None, Answer.UNKNOWN, "its bundle is gone")
        elif past.side in answers:
            probe = Probe(number, None, answers[past.side], "the same bundle as in a measured run")
        elif probes == MOST_PROBES:
            break
        else:
            probes += 1
            probe = measured_probe(number, past)
            answers[past.side] = probe.answer
        on_probe(probe)
        bracket = narrowed(bracket, number, probe.answer)
    return bracket


def _compared(claim: Claim, found: dict[str, list[Pair]], gate: float | None, level: float, looks: int) -> Compared:
    pairs = found.get(claim.series.metric, [])
    confirmation = confirm(claim.series.scale, pairs, up=claim.up, gate=gate, level=level, looks=looks, base=claim.base)
    return Compared(claim.series, confirmation, _whole(pairs))


def _needs_again(one: Compared) -> bool:
    """Return whether a process may have had its luck: outputs are the same in all of them."""
    return one.confirmation.answer is Answer.CONFIRMED and not one.series.of_outputs


def _compared_again(claim: Claim, one: Compared, found: dict[str, list[Pair]], gate: float | None) -> Compared:
    scale, pairs = claim.series.scale, found.get(claim.series.metric, [])
    gate = GATES[scale].confirmed if gate is None else gate
    confirmation = confirmed_again(scale, one.confirmation, pairs, up=claim.up, gate=gate, base=claim.base)
    return Compared(claim.series, confirmation, (*one.pairs, *_whole(pairs)))


def _whole(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs without missing ones."""
    return tuple(pair for pair in pairs if all(pair))


def _with_problem(one: Compared, problems: Sequence[str]) -> Compared:
    if not problems:
        return one
    reason = "; ".join(problems)
    if one.confirmation.pairs:
        reason += f": {one.confirmation.reason}"
    return msgspec.structs.replace(one, confirmation=msgspec.structs.replace(one.confirmation, reason=reason))


def _with_left(one: Compared, left: str) -> Compared:
    """Return the result as unknown if it refutes only a part of what differs."""
    if not left or one.confirmation.answer is not Answer.REFUTED:
        return one
    # The change of the program is not the change of the number.
    answer = msgspec.structs.replace(unsure(one.confirmation, not_measured(left)), change=math.nan)
    return msgspec.structs.replace(one, confirmation=answer, left=left)


def not_measured(left: str) -> str:
    """Return the reason of an unknown answer where only the program was compared."""
    return f"not the program; {left} was not measured"


# Factors swapped one at a time: is a change the program's, the runner's or the SDK's?


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
