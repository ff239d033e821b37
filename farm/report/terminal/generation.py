"""Figures of text generation -> lines for a terminal. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from farm.report.model import format as fmt
from farm.report.terminal.history import sparkline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.report.model.generation import GenerationFigures

_MIB = 1 << 20
_NAMED = 6
"""Lengths of prompts in one line."""


def rates(figures: GenerationFigures) -> list[str]:
    """Return the figures in a few words each: rates, first tokens, spread of steps, loss of rate, memory."""
    known = (("decode", figures.decode), ("prefill", figures.prefill))
    parts = [f"{name} {fmt.rate(rate.p50)} tokens/s" for name, rate in known if rate is not None]
    if figures.prompts:
        named = figures.prompts[:_NAMED]
        times = [f"{fmt.milliseconds(one.spread.p50 / 1e6)} ms after {fmt.count(one.tokens)}" for one in named]
        times[0] += " tokens" if named[0].tokens > 1 else " token"
        more = f" and {len(figures.prompts) - _NAMED} lengths more" if len(figures.prompts) > _NAMED else ""
        parts.append(f"first token {', '.join(times)}{more}")
    if steps := figures.steps:
        ranks = (("p50", steps.p50), ("p90", steps.p90), ("p99", steps.p99))
        parts.append("step " + ", ".join(f"{name} {fmt.milliseconds(ns / 1e6)}" for name, ns in ranks) + " ms")
    if figures.fall_text:
        parts.append(figures.fall_text)
    if figures.temperature_text:
        parts.append(figures.temperature_text)
    if figures.memory is not None:
        parts.append(f"{fmt.small(figures.memory / _MIB)} MiB of memory at most")
    return parts


def nearness(figures: GenerationFigures) -> list[str]:
    """Return the agreement of logits and tokens with the references, in a few words each; empty without references."""
    near = figures.logits
    parts = [
        f"{_db(db)} to {module}" + (f", {_db(worst)} at the worst position" if worst is not None else "")
        for module, db, worst in (
            ("the quantized module", near.quantized_db, near.quantized_worst_db),
            ("FP32", near.fp32_db, near.fp32_worst_db),
        )
        if db is not None
    ]
    if near.prefill_db is not None:
        parts.append(f"prefill {_db(near.prefill_db)} to decode")
    same = (("the quantized module", near.same_quantized), ("FP32", near.same_fp32))
    if shares := [f"{fmt.percent(share)} as {module}" for module, share in same if share is not None]:
        parts.append(f"tokens {', '.join(shares)}")
    if near.margin is not None:
        parts.append(f"least margin {near.margin:.3f}")
    return [*parts, *figures.tasks]


def _db(value: float | None) -> str:
    return "equal" if value == math.inf else f"{fmt.decibel(value)} dB"


def generation_lines(figures: GenerationFigures, label: str) -> Iterator[str]:
    """Yield a title and a line for each curve; `label` is the origin of the times, "" for times of a device."""
    if near := nearness(figures):
        yield "logits and tokens, of the worst prompt"
        yield from (f"  {part}" for part in near)
    yield f"generation{f', simulated: {label}' if label else ''}"
    yield from (f"  {part}" for part in rates(figures))
    prompts = [one.spread.p50 / 1e6 for one in figures.prompts]
    positions = [one.spread.p50 / 1e6 for one in figures.positions]
    lengths = f"prompts of {', '.join(str(one.tokens) for one in figures.prompts)} tokens"
    yield from _curve("first token", prompts, "ms", lengths)
    if figures.positions:
        stretch = f"positions {figures.positions[0].first} to {figures.positions[-1].last}"
        yield from _curve("step", positions, "ms", stretch)
    over = f"over {figures.seconds} s" if figures.seconds else "over time"
    yield from _curve("decode rate", figures.sustained, "tokens/s", over)
    yield from _curve("temperature", figures.temperatures, "C", over)
    for method, took in figures.loads:
        yield f"  {method} loaded in {fmt.quantity(took, 'ns')}"


def _curve(name: str, values: Sequence[float], unit: str, where: str) -> Iterator[str]:
    if len(set(values)) > 1:
        least, most = (fmt.milliseconds(value) for value in (min(values), max(values)))
        yield f"  {name} {sparkline(values)} {least} to {most} {unit}, {where}"
