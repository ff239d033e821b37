"""Differing programs on all available devices: a bench and a thread each; both sides run in turns until decided."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import FarmError, InfraError, MissingPackageError, NeedsDeviceError, NoDeviceError
from farm.base.grouping import grouped
from farm.base.text import reason_line
from farm.base.toml_tables import prepare_decoders
from farm.builds.runtime.native import Mode
from farm.builds.runtime.runtime import Runtime, runtime_for
from farm.devices.device import Device
from farm.dispatch.history_comparison import TEXT_RATES, TIMES
from farm.numbers.compare.sides import ComparisonRequest
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.report.model.compare import PairedMetric
from farm.results.analysis.confirmation import (
    MOST_INFERENCES,
    P_UNSUSPECTED,
    Answer,
    Confirmation,
    Pair,
    add_pairs,
    confirm,
    control,
    inferences_for,
    pairs_needed,
)
from farm.results.analysis.statistics import GATES, Series
from farm.results.attempt import Attempt, Direction, Measurement, Verdict
from farm.store.store import Store
from farm.suites.figures import figure_of, is_host_time
from farm.suites.suite import Target

# A job on a bench: each side is judged once, then both run in turns until its numbers are decided.


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
    found = grouped(
        (name, _metric(one, worse.get(number, one.worse), better.get(number, one.better)))
        for number, (name, one) in enumerate(rows)
    )
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


# Execution of differing programs on all available devices: a bench and a thread for each.


logger = logging.getLogger(__name__)

# Longest wait for a further device while one is held.
_TAKEN_S = 5.0
_MOST_DEVICES = 4
# Further tries of a failed device; its job is repeated with the new session.
_TRIES = 2
_LOOK_EVERY_S = 0.2


class JobToRun(msgspec.Struct, frozen=True, kw_only=True):
    """Job with at least one side to execute."""

    name: str
    target: Target
    """Target of either side: SoC and backend are equal."""
    a: Side | None
    """None if this side was not compiled."""
    b: Side | None


class MeasuringPool:
    """Devices that measure jobs, with a thread for each device."""

    def __init__(
        self, configs: tuple[Config, Config], store: Store, request: ComparisonRequest, stop: threading.Event
    ) -> None:
        """Take the `configs` of A and B; no job begins after `stop` is set."""
        self._configs, self._store, self._request = configs, store, request
        self._stop = stop
        self._lock = threading.Lock()
        self._retried: set[str] = set()
        self._most_pairs = 0
        self.devices: dict[str, Device] = {}
        """Serials by the name of the thread that uses it."""
        self.outcomes: dict[str, JobOutcome] = {}
        """Outcomes by job name."""
        self.left_out: dict[str, str] = {}
        """Reasons of jobs that were not executed, by job name."""

    def run(self, jobs: Sequence[JobToRun], look: Callable[[], None] = lambda: None) -> None:
        """Run all of `jobs`; `look` is called every 0.2 s, in this thread."""
        # Each job claims its cycles, and on hardware its latency as well.
        claims = len(jobs) * (1 if self._request.virtual else 2)
        self._most_pairs = max(self._request.pairs, pairs_needed(claims))
        queues: dict[str, deque[JobToRun]] = {}
        for job in jobs:
            queues.setdefault(job.target.soc, deque()).append(job)
        width = self._request.virtual or min(self._request.most_devices or _MOST_DEVICES, _MOST_DEVICES)
        threads = [
            threading.Thread(target=self._serve, args=(queue, number), name=f"bench-{soc}-{number}", daemon=True)
            for soc, queue in queues.items()
            for number in range(min(width, len(queue)))
        ]
        # Each thread reads leases from the store.
        prepare_decoders()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(_LOOK_EVERY_S)
            look()
        for queue in queues.values():
            for job in queue:
                self.left_out.setdefault(job.name, "interrupted" if self._stop.is_set() else "no device was left")

    def _serve(self, queue: deque[JobToRun], number: int) -> None:
        """Run the jobs of a queue on one device until the queue is empty; a failed device is opened again."""
        for tries_left in reversed(range(_TRIES + 1)):
            try:
                target = queue[0].target
            except IndexError:
                return
            try:
                with self._bench(target, number) as bench:
                    self._serve_on(bench, queue)
            except NoDeviceError as error:
                if not number:
                    self._give_up(queue, str(error))
                return
            except InfraError as error:
                if not tries_left or self._stop.is_set():
                    self._give_up(queue, str(error))
                    return
                logger.warning("once more: %s", reason_line(str(error)))
            except (FarmError, OSError) as error:
                self._give_up(queue, str(error))
                return
            else:
                return

    def _bench(self, target: Target, number: int) -> InterleavedBench:
        return InterleavedBench(
            self._configs[1],
            self._store,
            target,
            virtual=self._request.virtual > 0,
            choice=self._request.choice,
            purpose=self._request.command,
            until_s=time.monotonic() + _TAKEN_S if number else math.inf,
        )

    def _serve_on(self, bench: InterleavedBench, queue: deque[JobToRun]) -> None:
        """Run the jobs of a queue on `bench`. Raises InfraError; the failed job is put back once."""
        with self._lock:
            self.devices[threading.current_thread().name] = bench.device
        # Runtimes of side A by mode.
        runtimes: dict[Mode, Runtime | None] = {}
        while not self._stop.is_set():
            try:
                job = queue.popleft()
            except IndexError:
                return
            a = job.a
            if a is not None:
                mode = a.job.target.mode
                if mode not in runtimes:
                    runtimes[mode] = other_runtime(
                        self._configs[0], bench.device, self._request.backend, bench.runtime, mode
                    )
                a = msgspec.structs.replace(a, runtime=runtimes[mode])
            try:
                outcome = run_job(bench, a, job.b, self._most_pairs, self._stop)
            except InfraError as error:
                if job.name not in self._retried:
                    self._retried.add(job.name)
                    queue.appendleft(job)
                else:
                    self._keep(job, JobOutcome(device=bench.device.serial, problem=reason_line(str(error))))
                raise
            self._keep(job, outcome)

    def _keep(self, job: JobToRun, outcome: JobOutcome) -> None:
        with self._lock:
            self.outcomes[job.name] = outcome

    def _give_up(self, queue: deque[JobToRun], reason: str) -> None:
        logger.warning(reason_line(reason))
        for job in list(queue):
            # Another device may still run these jobs.
            self.left_out.setdefault(job.name, reason_line(reason))


def other_runtime(config: Config, device: Device, backend: str, runtime: Runtime, mode: Mode) -> Runtime | None:
    """Return the runtime of the toolchain in `config` for a device; None if it equals `runtime`."""
    found = runtime_for(config, device.soc, device.kind, device.os, backend, mode)
    return None if found.digest == runtime.digest else found
