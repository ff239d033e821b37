"""Measurements without a verdict, as metrics of an attempt: times, sizes, counts, rates of generated tokens. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any

from farm.base.grouping import grouped
from farm.results.attempt import Measurement
from farm.suites.figures import (
    COMPARED,
    COUNTERS,
    FIGURES,
    LATENCY_TAIL,
    LEAST_OF_TAIL,
    PEAK_MEMORY,
    VERIFICATION_TIME,
    Direction,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from farm.builds.bundles.bundle import Generation, Manifest
    from farm.devices.execution.raw import Observed
    from farm.results.numerics import Figures
    from farm.results.runner_report import Generated, RunnerReport
    from farm.suites.suite import Metric


# Measurements without a verdict: times, sizes and counts, as metrics of an attempt.
#
# A metric of outputs is a figure: `farm.suites.figures`.


def bundle_measurements(manifest: Manifest) -> tuple[Measurement, ...]:
    """Return the measurements known from compiling alone, which repeat exactly."""
    values = {
        "pte_size": manifest.pte_bytes,
        "partitions": manifest.partitions,
        "delegated_ops": manifest.delegated_ops,
        "fallback_ops": sum(manifest.fallback_ops.values()),
    }
    return tuple(counted(metric, value) for metric, value in values.items() if value is not None)


def counted(metric: str, *values: int) -> Measurement:
    """Return a counter's values as a measurement."""
    counter = COUNTERS[metric]
    return Measurement(metric, counter.unit, counter.direction, tuple(map(float, values)), exact=counter.exact)


def time_measurements(report: RunnerReport) -> tuple[Measurement, ...]:
    """Return `latency`, one sample per iteration of every inference without warm-up, and the time of the load.

    The load is `model_load_time` including the start of the backend, `warm_model_load_time` with a running backend, and
    `verification_time` beside them. A runner that verifies during the load reports other times: `load_time`,
    `warm_load_time`. A mean without samples is the one sample; unreported times are left out. `latency_tail` is there
    with enough inferences.
    """
    each: list[int | None] = [ns for inference in report.inferences for ns in inference.iterations_ns]
    load = "load_time" if report.verification_ns is None else "model_load_time"
    times = (
        ("latency", each or [report.mean_ns]),
        (f"warm_{load}" if report.warm else load, [report.load_ns]),
        (VERIFICATION_TIME, [report.verification_ns]),
    )
    known = ((name, tuple(float(ns) for ns in samples if ns is not None)) for name, samples in times)
    found = [Measurement(name, "ns", Direction.LOWER, samples) for name, samples in known if samples]
    return (*found, *tail_measurements([ns for ns in each if ns is not None]))


def tail_measurements(inferences_ns: Sequence[float]) -> tuple[Measurement, ...]:
    """Return `latency_tail` of the times of inferences, by the nearest rank; none for too few of them."""
    ordered = sorted(inferences_ns)
    if len(ordered) < LEAST_OF_TAIL or not (middle := statistics.median(ordered)):
        return ()
    slow = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return (Measurement(LATENCY_TAIL, "1", Direction.LOWER, (slow / middle,)),)


def numeric_measurements(figures: Mapping[tuple[int, str], Iterable[Figures]]) -> tuple[Measurement, ...]:
    """Return the figures recorded as measurements, one sample per inference.

    `figures` has the figures of each inference by output and reference. Equal outputs have an SQNR of inf. If an
    inference has no figure, or an infinitely bad one (its output is not finite), the metric is left out, as the
    comparison shows it.
    """
    measured = []
    for (output, reference), rows in figures.items():
        rows = list(rows)  # noqa: PLW2901 - read twice
        for figure in COMPARED:
            if reference not in figure.against:
                continue
            values = [getattr(row, figure.name) for row in rows]
            bad = -math.inf if figure.direction is Direction.HIGHER else math.inf
            if values and None not in values and bad not in values:
                name = f"{figure.word}_{reference}[{output}]"
                measured.append(Measurement(name, figure.unit, figure.direction, tuple(values), exact=figure.exact))
    return tuple(measured)


def measure(metric: Metric, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Measurement, str]:
    """Return `metric` of every sample, output and FP32 reference, and which limit it breaks, if any."""
    figure = FIGURES[metric.name]
    values = [figure.compute(actual, reference) if figure.compute else None for actual, reference in pairs]
    samples = tuple(math.nan if value is None else value for value in values)
    name = f"{figure.word}[{metric.output}]"
    measured = Measurement(name, figure.unit, figure.direction, samples, exact=figure.exact)
    value = sum(samples) / len(samples) if figure.by_mean else figure.worst(samples)
    if metric.least is None or not figure.breaks(value, metric.least):
        return measured, ""
    unit = " dB" if figure.unit == "dB" else ""
    return measured, f"{figure.word} {value:.4g} < {metric.least:.10g}{unit}"


# Times of generated tokens -> rates and times as metrics of an attempt. Pure.


WINDOWS = 12
"""Parts of equal length of a sustained run: five seconds each, of a minute."""
_LEAST_STEPS = 2 * WINDOWS
"""Fewest steps for rates of parts; with fewer a part has one step and no meaningful rate."""
_ENDS = 2
"""Parts at the beginning and at the end that a fall is between."""
_MOST_STRETCHES = 8
"""Most stretches of a context's positions, so that each can be a series."""
_MOST_NAME, _MOST_METHODS = 64, 16
"""Characters of a method's name, and methods: a report is not to be believed, and each is a series for good."""
_NS = 1e9
_MS = 1e6


def rate_measurements(generation: Generation, report: RunnerReport) -> tuple[Measurement, ...]:
    """Return times and rates of a generation, as far as the report has them.

    Per prompt, from its first round alone: `first_token_time[PROMPT]` by the tokens of the prompt, `prefill_rate` and
    `decode_rate` in tokens per second, `step_time[FIRST-LAST]` by stretches of positions. For a whole sustained run:
    `sustained_rate`, of WINDOWS parts in order, and `sustained_fall`. For the process: `method_load_time[METHOD]`,
    `peak_memory`.
    """
    first = report.generated[: len(generation.prompt_tokens)]
    # Scored sequences have as many lengths as a task has questions, so that no length makes a series.
    first_ns = [(one.prompt_tokens, one.first_token_ns or 0) for one in first]
    loads = sorted((name, ns) for name, ns in report.method_loads_ns.items() if len(name) <= _MOST_NAME)[:_MOST_METHODS]
    peak = report.peak_memory_bytes
    return (
        *(_first_tokens(first_ns) if generation.likelihoods is None else ()),
        *_rates("prefill_rate", first_ns),
        *_rates("decode_rate", [(len(one.tokens) - 1, _decode_ns(one)) for one in first]),
        *_by_position(first, generation.context),
        *(_sustained(report.generated) if len(report.generated) > len(first) else ()),
        *(_time(f"method_load_time[{name}]", [ns]) for name, ns in loads),
        *([] if peak is None else [Measurement(PEAK_MEMORY, "bytes", Direction.LOWER, (float(peak),))]),
    )


def observed_measurements(observed: Sequence[Observed]) -> tuple[Measurement, ...]:
    """Return the times of ExecuTorch's own runner, whole milliseconds; zero times are left out.

    Rates are defined as for farm's runner: of the prompt until the first token, and of the tokens after it.
    """
    first_ns = [(one.prompt_tokens, one.first_ms * _MS) for one in observed]
    loads = [one.load_ms * _MS for one in observed if one.load_ms]
    return (
        *_first_tokens(first_ns),
        *_rates("prefill_rate", first_ns),
        *_rates("decode_rate", [(one.generated_tokens, one.decode_ms * _MS) for one in observed]),
        *([_time("load_time", loads)] if loads else []),
    )


def temperatures(readings: Sequence[float]) -> tuple[Measurement, ...]:
    """Return the reported temperatures of a device during the execution, in order of time."""
    return (Measurement("temperature", "C", Direction.NONE, tuple(readings)),) if readings else ()


def stretch(context: int) -> int:
    """Return how many positions of a context one `step_time` is of: a power of two, the same for all its runs."""
    width = 1
    while width * _MOST_STRETCHES < context:
        width *= 2
    return width


def _time(metric: str, samples: Iterable[float]) -> Measurement:
    return Measurement(metric, "ns", Direction.LOWER, tuple(map(float, samples)))


def _decode_ns(one: Generated) -> int:
    """Return how long tokens after the first one took; 0 where there are none, or that is not known."""
    if one.total_ns is None or one.first_token_ns is None or not one.steps_ns or len(one.tokens) < 2:
        return 0
    return max(0, one.total_ns - one.first_token_ns)


def _first_tokens(first_ns: Iterable[tuple[int, float]]) -> Iterator[Measurement]:
    """Yield the times to the first token, by the tokens of the prompt; 0 is an unknown time."""
    for length, samples in sorted(grouped((length, ns) for length, ns in first_ns if ns).items()):
        yield _time(f"first_token_time[{length}]", samples)


def _rates(metric: str, taken: Iterable[tuple[int, float]]) -> Iterator[Measurement]:
    """Yield the rate of tokens in nanoseconds; pairs without tokens or time are left out."""
    samples = tuple(tokens * _NS / ns for tokens, ns in taken if tokens and ns)
    if samples:
        yield Measurement(metric, "tokens/s", Direction.HIGHER, samples)


def _by_position(generated: Iterable[Generated], context: int) -> Iterator[Measurement]:
    """Return the decode steps by the position of the token that they take."""
    width, found = stretch(context), dict[int, list[float]]()
    for one in generated:
        # A step that takes several positions may give several tokens: on average so many.
        tokens = (len(one.tokens) - 1) / len(one.steps_ns) if one.steps_ns else 0.0
        for number, ns in enumerate(one.steps_ns):
            found.setdefault((one.prompt_tokens + int(number * tokens)) // width, []).append(ns)
    for number, steps in sorted(found.items()):
        yield _time(f"step_time[{number * width}-{(number + 1) * width - 1}]", steps)


def _sustained(generated: Iterable[Generated]) -> Iterator[Measurement]:
    """Return the rate of each part of the time that decoding took, in order, and how far it fell."""
    import numpy as np

    steps, tokens = [], []
    for one in generated:
        if (took := _decode_ns(one)) and any(one.steps_ns):
            # The runner's work between two steps belongs to them.
            beside = took / sum(one.steps_ns)
            steps += [ns * beside for ns in one.steps_ns]
            tokens += [(len(one.tokens) - 1) / len(one.steps_ns)] * len(one.steps_ns)
    if len(steps) < _LEAST_STEPS:
        return
    time, count = (np.array([0.0, *itertools.accumulate(each)]) for each in (steps, tokens))
    edges = np.linspace(0.0, time[-1], WINDOWS + 1)
    rates = (np.diff(np.interp(edges, time, count)) * _NS / np.diff(edges)).tolist()
    yield Measurement("sustained_rate", "tokens/s", Direction.HIGHER, tuple(rates))
    # Share of the rate at the beginning that is lost at the end.
    fall = 1.0 - sum(rates[-_ENDS:]) / sum(rates[:_ENDS])
    yield Measurement("sustained_fall", "1", Direction.LOWER, (fall,))
