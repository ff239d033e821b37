"""Figures of text generation from the measurements of an attempt: rates, times by prompt and position. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from farm.report.model import format as fmt
from farm.report.model.chart import Chart, ChartPoint, chart
from farm.report.model.summary import JobSummary, RunSummary, Spread, spread_of
from farm.results.attempt import Attempt, Measurement

_BRACKETS = re.compile(r"(\w+)\[([^\]]*)\]")
_STRETCH = re.compile(r"(\d{1,9})-(\d{1,9})")
_SECONDS = re.compile(r"\d{1,6}")


class PromptTime(msgspec.Struct, frozen=True):
    """Time to the first token after prompts of one length, in nanoseconds."""

    tokens: int
    spread: Spread


class StretchTime(msgspec.Struct, frozen=True):
    """Time of a decode step in a range of positions, in nanoseconds."""

    first: int
    last: int
    spread: Spread


class LogitFigures(msgspec.Struct, frozen=True):
    """Agreement of the logits with the references over all positions, for the worst prompt and output.

    Values that were not compared are None.
    """

    quantized_db: float | None
    quantized_worst_db: float | None
    """SQNR at the worst position, in dB."""
    fp32_db: float | None
    fp32_worst_db: float | None
    prefill_db: float | None
    """SQNR of prompts by prefill against the same prompts by decode, in dB; inf where equal."""
    perplexity_ratio: float | None
    """Perplexity divided by the perplexity of the quantized module."""
    same_quantized: float | None
    """Share of the tokens before the first difference, over all prompts."""
    same_fp32: float | None
    margin: float | None
    """Least ratio of the FP32 probability of a chosen token to the probability of the likeliest token."""

    @property
    def any(self) -> bool:
        """Return True when anything was compared."""
        return any(value is not None for value in msgspec.structs.astuple(self))


class GenerationFigures(msgspec.Struct, frozen=True):
    """Figures of text generation in one attempt; figures without a measurement are None or empty."""

    logits: LogitFigures
    prefill: Spread | None
    """Tokens of prompts per second."""
    decode: Spread | None
    """Tokens per second after the first token."""
    steps: Spread | None
    """Times of decode steps, in nanoseconds."""
    prompts: tuple[PromptTime, ...]
    positions: tuple[StretchTime, ...]
    sustained: tuple[float, ...]
    """Tokens per second in equally long parts of a sustained run."""
    fall: float | None
    """Share of the rate that was lost by the end."""
    seconds: int | None
    """Planned length of the run."""
    temperatures: tuple[float, ...]
    """Degrees Celsius before, during and after the run."""
    loads: tuple[tuple[str, float], ...]
    """Load time in nanoseconds by method."""
    memory: float | None
    """Greatest resident memory of the runner, in bytes."""
    tasks: tuple[str, ...] = ()
    """Perplexity of a given text and number of correct answers, each beside the values of the references."""

    @property
    def fall_text(self) -> str:
        """Return the change of the rate: `rate -18.0 % after 60 s`; empty without a sustained run."""
        if self.fall is None:
            return ""
        # `fall` is negative when the rate rises, so the sign is inverted.
        return f"rate {-100 * self.fall:+.1f} %" + (f" after {self.seconds} s" if self.seconds else "")

    @property
    def temperature_text(self) -> str:
        """Return the first and the greatest temperature: `31.0 to 38.5 C`; empty without a measurement."""
        if not self.temperatures:
            return ""
        ends = dict.fromkeys(f"{one:.1f}" for one in (self.temperatures[0], max(self.temperatures)))
        return f"{' to '.join(ends)} C"


def generation_of(attempt: Attempt | None, fingerprint: Mapping[str, str]) -> GenerationFigures | None:
    """Return the figures of an attempt of a run with this fingerprint; None when nothing was generated."""
    if attempt is None:
        return None
    whole = {one.metric: one for one in attempt.measurements}
    parts: dict[str, list[tuple[str, Measurement]]] = {}
    for one in attempt.measurements:
        if match := _BRACKETS.fullmatch(one.metric):
            parts.setdefault(match[1], []).append((match[2], one))
    if not ({"decode_rate", "prefill_rate"} & whole.keys() or "first_token_time" in parts):
        return None
    seconds = fingerprint.get("seconds", "")
    fall, memory = (_median(whole.get(name)) for name in ("sustained_fall", "peak_memory"))
    return GenerationFigures(
        logits=_logits(attempt),
        prefill=_spread(whole.get("prefill_rate")),
        decode=_spread(whole.get("decode_rate")),
        # A single token after each prompt takes no decode step.
        steps=_spread(whole.get("latency")) if "decode_rate" in whole and _finite(whole.get("latency")) else None,
        prompts=tuple(_prompt_times(parts.get("first_token_time", ()))),
        positions=tuple(_stretch_times(parts.get("step_time", ()))),
        sustained=_finite(whole.get("sustained_rate")),
        fall=fall,
        seconds=int(seconds) if _SECONDS.fullmatch(seconds) else None,
        temperatures=_finite(whole.get("temperature")),
        loads=tuple(
            (name, spread.p50) for name, one in parts.get("method_load_time", ()) if (spread := spread_of(one))
        ),
        memory=memory,
        tasks=_task_texts(attempt),
    )


_REFERENCES = {"_quantized": "the quantized module", "_fp32": "FP32"}


def _task_texts(attempt: Attempt) -> tuple[str, ...]:
    single = (one for one in attempt.measurements if len(one.samples) == 1)
    values = {one.metric: one.samples[0] for one in single if math.isfinite(one.samples[0])}

    def with_references(name: str, place: str, show: Callable[[float], str]) -> str:
        others = [
            f"{module} {show(values[key])}"
            for suffix, module in _REFERENCES.items()
            if (key := f"{name}{suffix}[{place}]") in values
        ]
        return show(values[f"{name}[{place}]"]) + (f" ({', '.join(others)})" if others else "")

    texts = []
    # Perplexity of generated text is shown among the logit figures; `greedy_share` marks a given text.
    if "greedy_share[0]" in values and "perplexity[0]" in values:
        texts.append(f"perplexity {with_references('perplexity', '0', lambda value: f'{value:.6g}')}")
    if count := round(values.get("questions", 0)):
        for metric in ("acc", "acc_norm"):
            if f"accuracy[{metric}]" in values:
                right = with_references("accuracy", metric, lambda share: str(round(share * count)))
                texts.append(f"{metric} {right} of {count} right")
    return tuple(texts)


# Metric of each figure of logits, and the function that picks from its samples of all prompts and outputs.
_LOGITS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "quantized_db": ("sqnr_quantized", min),
    "quantized_worst_db": ("worst_position_quantized", min),
    "fp32_db": ("sqnr_fp32", min),
    "fp32_worst_db": ("worst_position_fp32", min),
    "prefill_db": ("prefill_quantized", min),
    "perplexity_ratio": ("perplexity_ratio_quantized", max),
    "same_quantized": ("same_tokens_quantized", statistics.fmean),
    "same_fp32": ("same_tokens_fp32", statistics.fmean),
    "margin": ("margin_fp32", min),
}


def _logits(attempt: Attempt) -> LogitFigures:
    samples: dict[str, list[float]] = {}
    for one in attempt.measurements:
        known = [sample for sample in one.samples if not math.isnan(sample)]
        samples.setdefault(one.metric.partition("[")[0], []).extend(known)
    return LogitFigures(**{
        field: pick(samples[metric]) if samples.get(metric) else None for field, (metric, pick) in _LOGITS.items()
    })  # fmt: skip


def generating(summary: RunSummary) -> tuple[tuple[JobSummary, GenerationFigures], ...]:
    """Return the jobs of a run whose final attempt generated text, and the figures."""
    facts = summary.view.fingerprint
    return tuple((job, found) for job in summary.jobs if (found := generation_of(job.attempt, facts)) is not None)


def generation_charts(figures: GenerationFigures) -> tuple[Chart, ...]:
    """Return the curves with two points or more: by prompt, by position, over time."""
    prompts = [ChartPoint(one.tokens, one.spread.p50, fmt.plural(one.tokens, "token")) for one in figures.prompts]
    positions = [
        ChartPoint((one.first + one.last) / 2, one.spread.p50, f"positions {one.first} to {one.last}")
        for one in figures.positions
    ]
    lengths = [one.tokens for one in figures.prompts]
    places = [place for one in figures.positions for place in (one.first, one.last)]
    # A rate covers a part of the time, a temperature a moment.
    rates, temperatures = (
        [ChartPoint(place, value, f"{place + 1} of {len(values)}") for place, value in enumerate(values)]
        for values in (figures.sustained, figures.temperatures)
    )
    time = ("0 s", f"{figures.seconds} s") if figures.seconds else ("start", "end")
    curves = (
        chart("time to first token, by tokens of the prompt", prompts, "ns", _ends(lengths)),
        chart("decode step, by position", positions, "ns", _ends(places)),
        chart("decode rate, over time", rates, "tokens/s", time),
        chart("temperature, over time", temperatures, "C", time, from_zero=False),
    )
    return tuple(one for one in curves if one is not None)


def _ends(places: Sequence[int]) -> tuple[str, str]:
    return (str(min(places)), str(max(places))) if places else ("", "")


def _prompt_times(parts: Iterable[tuple[str, Measurement]]) -> Iterable[PromptTime]:
    known = [(int(length), spread_of(one)) for length, one in parts if length.isascii() and length.isdecimal()]
    return (PromptTime(length, spread) for length, spread in sorted(known, key=lambda one: one[0]) if spread)


def _stretch_times(parts: Iterable[tuple[str, Measurement]]) -> Iterable[StretchTime]:
    found = ((_STRETCH.fullmatch(name), spread_of(one)) for name, one in parts)
    known = [StretchTime(int(match[1]), int(match[2]), spread) for match, spread in found if match and spread]
    return sorted(known, key=lambda one: one.first)


def _spread(measured: Measurement | None) -> Spread | None:
    return None if measured is None else spread_of(measured)


def _median(measured: Measurement | None) -> float | None:
    samples = _finite(measured)
    return statistics.median(samples) if samples else None


def _finite(measured: Measurement | None) -> tuple[float, ...]:
    return tuple(sample for sample in measured.samples if math.isfinite(sample)) if measured else ()
