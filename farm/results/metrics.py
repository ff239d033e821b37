"""What tells more of an output than how close it is, where its meaning is known. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from farm.results.attempt import Direction, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from farm.suites.suite import Metric


def top1_agreement(actual: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the share of positions whose greatest element along the last dimension is the same one.

    NaN is never the greatest; arrays of one shape, at least one dimension.
    """
    return float(np.mean(np.argmax(_comparable(actual), axis=-1) == np.argmax(_comparable(reference), axis=-1)))


def psnr_db(actual: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return 10 log10(peak^2 / mean (r - a)^2) in dB, the peak being the range of the reference r; inf where equal."""
    act, ref = actual.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        noise = float(np.mean((ref - act) ** 2))
    peak = float(np.max(ref) - np.min(ref))
    if not math.isfinite(noise) or not peak:
        return -math.inf
    return 10.0 * math.log10(peak * peak / noise) if noise else math.inf


def measure(metric: Metric, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Measurement, str]:
    """Return `metric` of every sample, output and FP32 reference, and which limit it breaks, if any."""
    if metric.name == "psnr_db":
        samples, unit = tuple(psnr_db(actual, reference) for actual, reference in pairs), "dB"
        value = min(samples)
    else:
        samples, unit = tuple(top1_agreement(actual, reference) for actual, reference in pairs), "1"
        value = sum(samples) / len(samples)
    name = metric.name.removesuffix("_db")
    measured = Measurement(f"{name}[{metric.output}]", unit, Direction.HIGHER, samples)
    if metric.least is None or value >= metric.least:
        return measured, ""
    return measured, f"{name} {value:.4g} < {metric.least:.10g}{' dB' if unit == 'dB' else ''}"


def _comparable(array: NDArray[Any]) -> NDArray[Any]:
    flat = np.atleast_1d(array)
    return np.where(np.isnan(flat), -np.inf, flat) if flat.dtype.kind == "f" else flat
