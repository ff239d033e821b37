"""The figures, or metrics, that outputs are compared by, and counters: unit and direction of each, declared once.

From the declaration of a figure follow its limit in a manifest, its text when the limit is broken, its measurement in
the store and how its history is compared. Adding one: docs/developers/recipes.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

REFERENCES = ("fp32", "quantized")
"""References of a quantized job's bundle; a floating-point bundle has the first alone."""


class Direction(StrEnum):
    """Direction in which a metric gets better."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"
    """Neither direction is better: values only differ."""


class Figure(msgspec.Struct, frozen=True):
    """Figure of one output of one sample."""

    name: str
    """Key of its limit in a manifest: the least value if higher is better, else the greatest."""
    unit: str
    """`dB`; `1` for a share, a ratio, or a value in the unit of the output."""
    direction: Direction
    compute: Callable[[NDArray[Any], NDArray[Any]], float | None] | None = None
    """Function from output and reference, float64 of equal shape, to the value or None; unset for figures that
    farm/results/numerics.py computes together."""
    against: tuple[str, ...] = REFERENCES
    """References against which its samples are kept as a measurement, `NAME_REFERENCE[OUTPUT]`."""
    has_column: bool = False
    """True for a figure with its own column in store and reports; a new figure is a measurement alone."""
    for_integers: bool = False
    """True for a figure of integer and boolean outputs; others are for floating point."""
    decides: bool = True
    """True if a limit for this figure alone is enough to judge an output."""
    near_one: bool = False
    """True for a figure whose distance from 1 counts, as the square of an error: 0.999 is good, 0.9 is bad."""
    on_request: bool = False
    """True if computed only for cases with it in `metrics`: against FP32, named `NAME[OUTPUT]`; higher is better."""
    of_logits: bool = False
    """True for a figure of logits of text generation alone."""
    by_mean: bool = False
    """True if the limit of a requested figure is for the mean over all samples, False for the worst sample."""
    exact: bool = False
    """True if the value repeats exactly on devices of the same kind."""
    least: float = -math.inf
    """Smallest possible value; with `greatest`, the range in which a limit makes sense."""
    greatest: float = math.inf

    @property
    def word(self) -> str:
        """Name in texts and metrics, without the unit: `sqnr` of `sqnr_db`."""
        return self.name.removesuffix("_db")

    def worst(self, values: Sequence[float]) -> float:
        """Return the worst of some values; NaN if one is NaN."""
        if any(map(math.isnan, values)):
            return math.nan
        return min(values) if self.direction is Direction.HIGHER else max(values)

    def limit_problem(self, limit: float) -> str:
        """Return the reason why `limit` is no valid limit of the figure; "" for a valid one."""
        if self.least <= limit <= self.greatest:
            return ""
        most = f" and at most {self.greatest:g}" if self.greatest < math.inf else ""
        return f"is {limit:g}, expected {'a number' if self.least == -math.inf else f'at least {self.least:g}'}{most}"

    def can_break(self, limit: float) -> bool:
        """Return whether a value may break the limit: a share of 1 is the greatest anyway, and nothing exceeds inf."""
        return limit > self.least if self.direction is Direction.HIGHER else limit < self.greatest

    def breaks(self, value: float, limit: float) -> bool:
        """Return whether a value breaks a limit; NaN always does."""
        return not (value >= limit if self.direction is Direction.HIGHER else value <= limit)

    def excess(self, value: float, limit: float) -> float:
        """Return how many times over a broken limit the error is, as an amplitude: comparable between figures."""
        if self.unit == "dB":
            return math.pow(10.0, min(abs(limit - value) / 20, 300.0))
        if self.near_one:
            return math.sqrt(_ratio(1 - value, 1 - limit))
        return _ratio(limit, value) if self.direction is Direction.HIGHER else _ratio(value, limit)

    def broken_text(self, value: float, limit: float) -> str:
        """Return `sqnr 12.3 dB < 20 dB`, with enough digits to distinguish the two."""
        unit = " dB" if self.unit == "dB" else ""
        shown, digits = f"{value:.4g}", 5
        while float(shown) == limit and digits <= 17:
            shown, digits = f"{value:.{digits}g}", digits + 1
        return f"{self.word} {shown}{unit} {'<' if self.direction is Direction.HIGHER else '>'} {limit:.10g}{unit}"


def _ratio(value: float, limit: float) -> float:
    return value / limit if limit > 0 else math.inf


def top1_agreement(actual: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the share of positions whose greatest element along the last dimension is the same one.

    NaN is never the greatest; arrays of one shape.
    """
    import numpy as np

    def greatest(array: NDArray[Any]) -> NDArray[Any]:
        flat = np.atleast_1d(array)
        shown = np.where(np.isnan(flat), -np.inf, flat) if flat.dtype.kind == "f" else flat
        return np.asarray(np.argmax(shown, axis=-1))

    return float(np.mean(greatest(actual) == greatest(reference)))


def psnr_db(actual: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return 10 log10(peak^2 / mean (r - a)^2) in dB, the peak being the range of the reference r; inf where equal."""
    import numpy as np

    act, ref = actual.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        noise = float(np.mean((ref - act) ** 2))
    peak = float(np.max(ref) - np.min(ref))
    if not math.isfinite(noise) or not peak:
        return -math.inf
    return 10.0 * math.log10(peak * peak / noise) if noise else math.inf


def worst_position_db(actual: NDArray[Any], reference: NDArray[Any]) -> float | None:
    """Return the least SQNR of a position, a row, in dB; inf where all are equal.

    Rows that are zero in both are beyond the end of the sequence; None where all are. Elements that are not finite in
    both stay out of the sums.
    """
    import numpy as np

    finite = np.isfinite(actual) & np.isfinite(reference)
    act, ref = (np.where(finite, one, 0.0).astype(np.float64) for one in (actual, reference))
    with np.errstate(divide="ignore", invalid="ignore"):
        signal, noise = np.sum(ref * ref, axis=-1), np.sum((ref - act) ** 2, axis=-1)
        counts = (signal > 0) | (noise > 0)
        ratios = np.where(noise > 0, signal / noise, np.inf)[counts]
        return float(10.0 * np.log10(np.min(ratios))) if ratios.size else None


def kl_divergence(actual: NDArray[Any], reference: NDArray[Any]) -> float | None:
    """Return the mean over positions of sum p (log p - log q), in nats: p of the reference's logits, q of the output's.

    Rows that are zero in the reference are beyond the end of the sequence; None where all are. A logit of -inf in both
    adds nothing; NaN for a row without probabilities.
    """
    import numpy as np

    total, rows = 0.0, 0
    # Row by row: a vocabulary of 128,000 times a context of 1,000 in float64 is 1 GB.
    for act, ref in zip(actual.astype(np.float64), reference.astype(np.float64), strict=True):
        if not np.any(ref):
            continue
        with np.errstate(invalid="ignore"):
            p, q = log_softmax(ref), log_softmax(act)
            total, rows = total + float(np.sum(np.where(p == -np.inf, 0.0, np.exp(p) * (p - q)))), rows + 1
    # Rounding may leave it a little below zero. `max(0.0, NaN)` is 0.0.
    return float(np.maximum(0.0, total / rows)) if rows else None


def log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Return the natural logarithms of the probabilities that `logits` stand for, along the last dimension."""
    import numpy as np

    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)))


_LOWER, _HIGHER = Direction.LOWER, Direction.HIGHER

FIGURES = {
    figure.name: figure
    for figure in (
        # Largest difference in quantization steps, for a quantized output.
        Figure("steps", "1", _LOWER, against=(), has_column=True, least=0),
        Figure("peak", "1", _LOWER, against=(), has_column=True, least=0),
        # Loss of SQNR against FP32, compared with the quantized module on the CPU.
        Figure("loss_db", "dB", _LOWER, against=(), has_column=True, decides=False),
        Figure("sqnr_db", "dB", _HIGHER, has_column=True),
        Figure("cosine", "1", _HIGHER, against=("fp32",), has_column=True, near_one=True, least=-1, greatest=1),
        Figure("max_abs", "1", _LOWER, against=(), has_column=True, least=0),
        Figure("mismatch", "1", _LOWER, against=(), has_column=True, for_integers=True, least=0, greatest=1),
        # Figures of generated text; the last three: farm/results/generation.py.
        Figure("worst_position_db", "dB", _HIGHER, worst_position_db, of_logits=True),
        Figure("kl", "1", _LOWER, kl_divergence, of_logits=True, decides=False, least=0),
        # Perplexity of the scored sequence by the output, divided by its perplexity by the reference.
        Figure("perplexity_ratio", "1", _LOWER, of_logits=True, decides=False, least=0),
        # SQNR in the prompt of the logits by `prefill_forward` against the logits by `kv_forward`; first output only.
        Figure("prefill_db", "dB", _HIGHER, against=("quantized",), of_logits=True, decides=False),
        # Figures of a task: questions whose likeliest choice differs from the reference's, and answers that only the
        # reference has right: farm/results/likelihoods.py.
        Figure("other_choices", "count", _LOWER, of_logits=True, decides=False, least=0),
        Figure("lost_answers", "count", _LOWER, of_logits=True, decides=False),
        # Smallest ratio of a chosen token's probability to the likeliest token's probability, by the FP32 module.
        Figure("margin", "1", _HIGHER, against=(), of_logits=True, decides=False, least=0, greatest=1),
        Figure("top1", "1", _HIGHER, top1_agreement, on_request=True, by_mean=True, least=0, greatest=1),
        Figure("tokens", "1", _HIGHER, top1_agreement, on_request=True, by_mean=True, least=0, greatest=1),
        Figure("psnr_db", "dB", _HIGHER, psnr_db, on_request=True),
    )
}
"""Figures by name, in the order of limits."""

COMPARED = tuple(figure for figure in FIGURES.values() if not figure.on_request)
"""Figures of every output against every reference."""
COLUMNS = tuple(figure.name for figure in COMPARED if figure.has_column)


class Counter(msgspec.Struct, frozen=True):
    """Counter of a program."""

    unit: str
    direction: Direction
    exact: bool = True
    """True if the value repeats exactly, so that any difference is a change of the program."""
    judged: bool = True
    """True if the value is compared with earlier runs."""
    signed: bool = False
    """True if values may be zero or negative, so that they are compared by difference, not by ratio."""


COUNTERS = {
    "pte_size": Counter("bytes", _LOWER),
    # A fusion takes nodes out of delegates, and an operator that is newly delegated may be a partition of its own. What
    # is lost to the CPU shows as fallback.
    "partitions": Counter("count", Direction.NONE),
    "delegated_ops": Counter("count", Direction.NONE),
    "fallback_ops": Counter("count", _LOWER),
    # `before` and `after` include other users of the DSP; only their difference is of the program. Its repeatability is
    # not measured yet.
    "dsp_heap_before": Counter("bytes", Direction.NONE, exact=False, judged=False),
    "dsp_heap_after": Counter("bytes", Direction.NONE, exact=False, judged=False),
    "dsp_heap_difference": Counter("bytes", _LOWER, exact=False, signed=True),
    # Shares of equal generated tokens. Logits judge the choice; one different token changes all later ones.
    "same_tokens_fp32": Counter("1", _HIGHER, exact=False, judged=False),
    "same_tokens_quantized": Counter("1", _HIGHER, exact=False, judged=False),
    # Not judged, since `latency` has the same steps.
    "step_time": Counter("ns", _LOWER, exact=False, judged=False),
    "temperature": Counter("C", Direction.NONE, exact=False, judged=False),
}
"""Counters by metric, without the part in brackets."""

TIME_UNITS = ("ns", "tokens/s")
"""Units of metrics from a clock."""
LATENCY_TAIL = "latency_tail"
"""95th percentile of a run's inferences by their median: slow ones, which a median does not show."""
LEAST_OF_TAIL = 20
"""Fewest inferences for it: of fewer, a single slow one would be the percentile."""
_OF_TIMES = frozenset({LATENCY_TAIL, "sustained_fall"})

PEAK_MEMORY = "peak_memory"
"""Peak resident memory of the runner's process, over all programs that it ran."""
LOAD_TIMES = ("warm_model_load_time", "model_load_time", "warm_load_time", "load_time")
"""Metrics of the time to load a program (docs/explanation/verdicts.md): two of today, two of older runners."""
VERIFICATION_TIME = "verification_time"
"""Time of farm's own check for damage before a load; no comparison uses it."""


@lru_cache(4096)
def figure_of(metric: str) -> Figure | None:
    """Return the figure of a metric: `sqnr_db` for `sqnr_fp32[0]`; None for metrics without one."""
    word = metric.partition("[")[0]
    for reference in REFERENCES:
        word = word.removesuffix(f"_{reference}")
    return next((figure for figure in FIGURES.values() if figure.word == word), None) if "[" in metric else None


def series_value(metric: str, samples: Sequence[float]) -> float | None:
    """Return the value of an attempt in the series of a metric; None without samples.

    A figure has the value that its limit judges: the worst sample or the mean. Other metrics have the median.
    NaN if a sample is NaN.
    """
    if not samples:
        return None
    figure = figure_of(metric)
    if figure is None:
        # The median of NaN and other samples depends on their order.
        if any(map(math.isnan, samples)):
            return math.nan
        return statistics.median(samples)
    return statistics.fmean(samples) if figure.by_mean else figure.worst(samples)


def counter_of(metric: str) -> Counter | None:
    """Return the counter of a metric: `step_time` for `step_time[0-63]`; None for metrics without one."""
    return COUNTERS.get(metric.partition("[")[0])


def is_host_time(metric: str, unit: str) -> bool:
    """Return whether the metric is a time: on a virtual device it depends on the host."""
    return unit in TIME_UNITS or metric in _OF_TIMES


def is_of_host(metric: str, unit: str, kind: str) -> bool:
    """Return whether a number of a virtual device depends on its host: times of a simulator, and its cycles."""
    return kind == "virtual" and (unit == "cycles" or is_host_time(metric, unit))


def figure_fields() -> list[tuple[str, Any, None]]:
    """Return a field for each compared figure, as msgspec.defstruct takes them: a number or None."""
    return [(figure.name, float | None, None) for figure in COMPARED]
