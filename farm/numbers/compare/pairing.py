"""A job on a bench: each side is judged once, then both run in turns until its numbers are decided."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import MissingPackageError, NeedsDeviceError
from farm.base.text import reason_line
from farm.dispatch.history_comparison import TEXT_RATES, TIMES
from farm.report.model.compare import PairedMetric
from farm.results.analysis.confirmation import P_UNSUSPECTED, Answer, Confirmation, Pair, confirm, control
from farm.results.analysis.scale import GATES, Series
from farm.results.analysis.sequential import MOST_INFERENCES, add_pairs, inferences_for
from farm.results.attempt import Attempt, Direction, Measurement, Verdict
from farm.suites.figures import figure_of, is_host_time

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side

FIRST_PAIRS = 6
"""Pairs after which a job without a moved number is not measured again. A confirmation needs more pairs."""
# From so many gates on a number points somewhere.
_POINTS = 0.5
# Part of the names of figures against the quantized module, which each side has for itself.
_QUANTIZED = "_quantized["
# Least time of one side in a pair and its inferences, as in `farm perf confirm` of a run; slow programs need fewer, as
# a moment cannot disturb them.


class MeasuredMetric(msgspec.Struct, frozen=True, kw_only=True):
    """Number of both sides, with the results of pairs on both claims: B is worse, and B is better."""

    series: Series
    pairs: tuple[Pair, ...]
    worse: Confirmation
    better: Confirmation
    decides: bool

    @property
    def gates(self) -> float:
        """How many gates the estimate is away from no change, positive for the worse; 0 without pairs."""
        if math.isnan(self.worse.change):
            return 0.0
        size = self.worse.change / GATES[self.series.scale].confirmed
        return -size if self.series.direction is Direction.HIGHER else size


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of executing a job on both sides."""

    a: Attempt | None = None
    b: Attempt | None = None
    metrics: tuple[MeasuredMetric, ...] = ()
    device: str = ""
    problem: str = ""
    """Reason of a missing comparison; empty for none."""
    outputs: tuple[int, int] | None = None
    """Output files of the judged turns that are equal byte for byte, and all; None where a side has none."""


def run_job(
    bench: InterleavedBench, a: Side | None, b: Side | None, most_pairs: int, stop: threading.Event
) -> JobOutcome:
    """Run a job: each side that there is once, judged; where both can be run, in turns. Raises InfraError."""
    sides = [side for side in (a, b) if side is not None]
    try:
        bench.measure(sides[0], sides[-1], 0)
    except (NeedsDeviceError, MissingPackageError) as error:
        return JobOutcome(device=bench.device.serial, problem=reason_line(str(error)))
    first, second = (None if side is None else bench.judged.get(side.key) for side in (a, b))
    outcome = JobOutcome(a=first, b=second, device=bench.device.serial, outputs=_equal_outputs(bench, a, b))
    if a is None or b is None or first is None or second is None or not (_is_usable(first) and _is_usable(second)):
        return outcome
    since = len(bench.turns)
    metrics = _measure(bench, (a, b), (first, second), most_pairs, stop)
    problems = bench.problems(a, b, since=since)
    problem = f"not in every turn: {'; '.join(problems)}" if problems else _lost_figures(first, second)
    return msgspec.structs.replace(outcome, metrics=metrics, problem=reason_line(problem))


def _lost_figures(first: Attempt, second: Attempt) -> str:
    """Return the figures that decide and that A alone has, as an infinitely bad one is no measurement; "" for none."""
    a, b = ({one.metric for one in attempt.measurements} for attempt in (first, second))
    lost = sorted(metric for metric in a - b if figure_of(metric) is not None and _QUANTIZED not in metric)
    return f"B has no finite {' and no finite '.join(lost)}" if lost else ""


def _equal_outputs(bench: InterleavedBench, a: Side | None, b: Side | None) -> tuple[int, int] | None:
    of_a, of_b = (bench.outputs.get(side.key, ()) if side is not None else () for side in (a, b))
    if not of_a or not of_b:
        return None
    return sum(one == other for one, other in zip(of_a, of_b, strict=False)), max(len(of_a), len(of_b))


def paired(outcomes: Mapping[str, JobOutcome]) -> dict[str, tuple[PairedMetric, ...]]:
    """Return the numbers of every job, with false discoveries among all confirmations controlled."""
    rows = [(name, one) for name, outcome in outcomes.items() for one in outcome.metrics]
    # A single measurement supports no claim.
    family = [number for number, (_, one) in enumerate(rows) if one.decides and one.worse.pairs > 1]
    worse = dict(zip(family, control([rows[number][1].worse for number in family]), strict=True))
    better = dict(zip(family, control([rows[number][1].better for number in family]), strict=True))
    found: dict[str, list[PairedMetric]] = {}
    for number, (name, one) in enumerate(rows):
        found.setdefault(name, []).append(_metric(one, worse.get(number, one.worse), better.get(number, one.better)))
    return {name: tuple(metrics) for name, metrics in found.items()}


def _is_usable(attempt: Attempt) -> bool:
    """Tell whether the turns of a side count: it passed, or its known issue shows."""
    return attempt.verdict is Verdict.PASSED or (attempt.verdict is Verdict.FAILED and bool(attempt.known_issue))


def _measure(
    bench: InterleavedBench,
    sides: tuple[Side, Side],
    judged: tuple[Attempt, Attempt],
    most_pairs: int,
    stop: threading.Event,
) -> tuple[MeasuredMetric, ...]:
    figures = figures_of(*judged)
    # Outputs repeat: where none moved they are not brought again.
    moved = {one.series.metric for one in figures if one.decides and abs(one.gates) > 1.0}
    qnn = [[side.bundle.manifest.versions.get(name) for name in ("qnn", "qnn_content")] for side in sides]
    left = [side.bundle.manifest.fallback_ops for side in sides]
    times = times_of(
        *judged, virtual=bench.device.kind == "virtual", one_simulator=qnn[0] == qnn[1], same_share=left[0] == left[1]
    )
    inferences = inferences_of([one for attempt in judged for one in attempt.measurements])
    pairs: dict[str, list[Pair]] = {}
    metrics: tuple[MeasuredMetric, ...] = figures
    done = 0
    for target in (FIRST_PAIRS, most_pairs, 2 * most_pairs):
        for metric, more in bench.measure(*sides, target - done, inferences, numerics=bool(moved), begin=done).items():
            add_pairs(pairs.setdefault(metric, []), done, more)
        done = target
        metrics = (
            *(judged_metric(series, pairs.get(series.metric, ()), decides=decides) for series, decides in times),
            *(
                judged_metric(one.series, pairs.get(one.series.metric, ()), decides=one.decides)
                if one.series.metric in moved
                else one
                for one in figures
            ),
        )
        if stop.is_set() or not is_open(metrics, first=target == FIRST_PAIRS):
            break
    return metrics


def judged_metric(series: Series, pairs: Sequence[Pair], *, decides: bool) -> MeasuredMetric:
    """Return the results of pairs on both claims about a series."""
    up = series.direction is not Direction.HIGHER
    worse, better = (confirm(series.scale, pairs, up=way, level=P_UNSUSPECTED) for way in (up, not up))
    whole = tuple(pair for pair in pairs if all(pair))
    return MeasuredMetric(series=series, pairs=whole, worse=worse, better=better, decides=decides)


def times_of(
    first: Attempt, second: Attempt, *, virtual: bool, one_simulator: bool = True, same_share: bool = True
) -> list[tuple[Series, bool]]:
    """Return the times of both sides, each with the decision whether it counts.

    On a simulator `latency` and rates come from its host's clock, and `htp_cycles` depend on the simulator's speed.
    Without the `same_share` on the CPU, the side that delegates more has more cycles and is not worse for it.
    """
    known = {one.metric: one for one in first.measurements}
    both = [one for one in second.measurements if one.metric in (*TIMES, *TEXT_RATES) and one.metric in known]

    def decides(one: Measurement) -> bool:
        is_host = is_host_time(one.metric, one.unit)
        return (is_host or same_share) and (not virtual or (one_simulator and not is_host))

    return [(_series(one), decides(one)) for one in both]


def figures_of(first: Attempt, second: Attempt) -> tuple[MeasuredMetric, ...]:
    """Return the figures that both judged turns have, each as one pair.

    Figures against the FP32 module decide, as it is equal on both sides. Figures against the quantized module, which
    each side has for itself, are not comparable. A difference below the gate counts as none: outputs repeat.
    """
    known = {one.metric: one for one in first.measurements}
    both = [one for one in second.measurements if figure_of(one.metric) is not None and one.metric in known]
    found = []
    for one in both:
        before, after = known[one.metric].value, one.value
        if before is None or after is None:
            continue
        pair = (before,), (after,)
        figure = judged_metric(_series(one), [pair], decides=_QUANTIZED not in one.metric)
        if figure.worse.pairs and abs(figure.gates) <= 1.0:
            worse, better = (
                msgspec.structs.replace(claim, answer=Answer.REFUTED, reason="measured once, short of what counts")
                for claim in (figure.worse, figure.better)
            )
            figure = msgspec.structs.replace(figure, worse=worse, better=better)
        found.append(figure)
    return tuple(found)


def inferences_of(measurements: Sequence[Measurement]) -> int:
    """Return how many inferences a side has in a pair, from the latencies of the judged turns."""
    latencies = [statistics.median(one.samples) for one in measurements if one.metric == "latency" and one.samples]
    longest = max(latencies, default=0.0)
    return inferences_for(longest, 1) if longest > 0 else MOST_INFERENCES


def is_open(metrics: Sequence[MeasuredMetric], *, first: bool) -> bool:
    """Tell whether more pairs are wanted: at first where a number points anywhere, then where it may still be worse."""
    deciding = [one for one in metrics if one.decides and one.worse.pairs > 1]
    if first:
        return any(abs(one.gates) > _POINTS for one in deciding)
    return any(one.gates > 1.0 and one.worse.answer is Answer.UNKNOWN for one in deciding)


def _series(one: Measurement) -> Series:
    return Series("", one.metric, one.unit, one.direction)


def _metric(one: MeasuredMetric, worse: Confirmation, better: Confirmation) -> PairedMetric:
    a, b = ([statistics.median(pair[side]) for pair in one.pairs if len(pair[side])] for side in (0, 1))
    return PairedMetric(
        metric=one.series.metric,
        unit=one.series.unit,
        a=statistics.median(a) if a else math.nan,
        b=statistics.median(b) if b else math.nan,
        change=worse.change,
        low=worse.low,
        high=worse.high,
        pairs=worse.pairs,
        p_value=min(worse.p_value, better.p_value),
        worse=worse.answer,
        better=better.answer,
        decides=one.decides,
    )
