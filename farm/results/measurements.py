"""Measurements without a verdict: times, sizes and counts, as metrics of an attempt.

A metric of outputs is a figure: `farm.suites.figures`.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from farm.results.attempt import Measurement
from farm.suites.figures import COMPARED, COUNTERS, FIGURES, LATENCY_TAIL, LEAST_OF_TAIL, VERIFICATION_TIME, Direction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from farm.builds.bundles.bundle import Manifest
    from farm.results.numerics import Figures
    from farm.results.runner_report import RunnerReport
    from farm.suites.suite import Metric


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
