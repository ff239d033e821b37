"""Times of generated tokens -> rates and times as metrics of an attempt. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from farm.results.attempt import Measurement
from farm.suites.figures import PEAK_MEMORY, Direction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farm.builds.bundles.bundle import Generation
    from farm.devices.execution.observed import Observed
    from farm.results.runner_report import Generated, RunnerReport

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
    by_length: dict[int, list[float]] = {}
    for length, ns in first_ns:
        if ns:
            by_length.setdefault(length, []).append(ns)
    for length, samples in sorted(by_length.items()):
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
