"""Series and numbers as the farm has them, made up with a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, settings

from farm.results.analysis.confirmation import Pair
from farm.results.analysis.statistics import Series
from farm.results.attempt import Direction

# A loaded machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LATENCY = Series("smoke/conv2d latency", "latency", "ns", Direction.LOWER)
SQNR = Series("smoke/conv2d sqnr", "sqnr_fp32[0]", "dB", Direction.HIGHER)
COSINE = Series("smoke/conv2d cosine", "cosine_fp32[0]", "1", Direction.HIGHER)
TOP1 = Series("models/vit top1", "top1_agreement[0]", "1", Direction.HIGHER)
FALLBACK = Series("smoke/conv2d fallback", "fallback_ops", "count", Direction.LOWER, exact=True)
DELEGATED = Series("smoke/conv2d delegated", "delegated_ops", "count", Direction.NONE, exact=True)


def noisy(count: int, level: float = 1e6, noise: float = 0.02, seed: int = 0) -> list[float]:
    """Return `count` values around `level`, in nanoseconds."""
    return [float(one) for one in level * (1.0 + noise * np.random.default_rng(seed).standard_normal(count))]


def in_turns(ratio: float, count: int = 10, noise: float = 0.03, seed: int = 0) -> Sequence[Pair]:
    """Return pairs of five inferences each, of a device that drifts by 10 %; the new bundle takes `ratio` as long."""
    draw = np.random.default_rng(seed)
    warmth = 1.0 + 0.1 * draw.standard_normal(count)
    samples = 1e6 * warmth[:, None, None] * (1.0 + noise * draw.standard_normal((count, 2, 5)))
    return [(good.tolist(), (ratio * new).tolist()) for good, new in samples]
