"""Expectations of a case of text generation or scoring: rates, perplexity, accuracy. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.results.attempt import Measurement
    from farm.suites.suite import Expectation


def slow_problem(expected: Expectation, measured: Iterable[Measurement]) -> str:
    """Return the rate below its expected value; "" for none. Only attached devices are judged."""
    samples = {one.metric: one.samples for one in measured}
    limits = {"decode_rate": expected.least_decode_rate, "prefill_rate": expected.least_prefill_rate}
    for metric, least in limits.items():
        if least is None:
            continue
        if not samples.get(metric):
            return f"{metric} was not measured, expected {least:g} tokens/s or more"
        if (rate := statistics.median(samples[metric])) < least:
            return f"{metric} is {rate:.4g} tokens/s, expected {least:g} or more"
    return ""


def expectation_problem(expected: Expectation, measured: Iterable[Measurement]) -> str:
    """Return what of perplexity or accuracy is worse than expected; "" where nothing is."""
    samples = {one.metric: one.samples for one in measured}
    limits = {"perplexity": expected.most_perplexity, "word_perplexity": expected.most_word_perplexity}
    for metric, most in limits.items():
        if most is None:
            continue
        worst = max(samples.get(f"{metric}[0]", ()), default=None)
        if worst is None:
            return f"{metric} was not measured, expected {most:g} or less"
        if worst > most:
            return f"{metric} is {worst:.5g}, expected {most:g} or less"
    for metric, least in (expected.least_accuracy or {}).items():
        found = samples.get(f"accuracy[{metric}]")
        if not found:
            return f"{metric} was not measured, expected {least:g} or more"
        if found[0] < least:
            count = round(samples["questions"][0])
            return f"{metric} is {found[0]:.4g} ({round(found[0] * count)} of {count}), expected {least:g} or more"
    return ""
