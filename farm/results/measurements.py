"""What is measured but does not decide: times, sizes, counts and figures, as Measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from farm.results.attempt import Direction, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farm.bundles.bundle import Manifest
    from farm.results.numerics import Figures
    from farm.results.runner_report import RunnerReport


def bundle_measurements(manifest: Manifest) -> tuple[Measurement, ...]:
    """Return what is known from compiling alone; repeats exactly."""
    rows = (
        ("pte_size", "bytes", Direction.LOWER, manifest.pte_bytes),
        ("partitions", "count", Direction.LOWER, manifest.partitions),
        ("delegated_ops", "count", Direction.HIGHER, manifest.delegated_ops),
        ("fallback_ops", "count", Direction.LOWER, sum(manifest.fallback_ops.values())),
    )
    return tuple(
        Measurement(name, unit, way, (float(value),), exact=True)
        for name, unit, way, value in rows
        if value is not None
    )


def time_measurements(report: RunnerReport) -> tuple[Measurement, ...]:
    """Return `latency`, one sample per iteration of every inference without warm-up, and the time of the load.

    That is `load_time` with the start of the backend in it, `warm_load_time` where the backend was up already.
    """
    latency = tuple(float(ns) for inference in report.inferences for ns in inference.iterations_ns)
    return (
        Measurement("latency", "ns", Direction.LOWER, latency),
        Measurement("warm_load_time" if report.warm else "load_time", "ns", Direction.LOWER, (float(report.load_ns),)),
    )


def numeric_measurements(figures: Mapping[tuple[int, str], Iterable[Figures]]) -> tuple[Measurement, ...]:
    """Return SQNR against both references and cosine against FP32, one sample per inference.

    `figures` has, by output and reference, those of each inference. Equal outputs have an SQNR of inf. Where one
    inference has no figure, or -inf (its output is not finite), the metric is left out: the comparison shows it.
    """
    measured = []
    for (output, reference), rows in figures.items():
        rows = list(rows)  # noqa: PLW2901 - read twice
        wanted = {"sqnr": ("dB", [row.sqnr_db for row in rows])}
        if reference == "fp32":
            wanted["cosine"] = ("1", [row.cosine for row in rows])
        for name, (unit, values) in wanted.items():
            samples = tuple(value for value in values if value is not None and value > -math.inf)
            if samples and len(samples) == len(rows):
                measured.append(Measurement(f"{name}_{reference}[{output}]", unit, Direction.HIGHER, samples))
    return tuple(measured)
