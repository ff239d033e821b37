"""What programs took that generate text -> lines for a terminal. Pure."""

from __future__ import annotations

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
    """Return what generating took in a few words each: rates, first tokens, how steps are spread, a fall, memory."""
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
        parts.append(f"rate {figures.fall_text}")
    if figures.temperature_text:
        parts.append(figures.temperature_text)
    if figures.memory is not None:
        parts.append(f"{fmt.small(figures.memory / _MIB)} MiB of memory at most")
    return parts


def generation_lines(figures: GenerationFigures, label: str) -> Iterator[str]:
    """Yield a title and a line for each curve; `label` says what the times are where they are no device's."""
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
