"""Scored sequences: perplexity of a text, and the likeliest choices of a task.

Program, quantized module and FP32 module are treated alike, from logarithms of probabilities: sums over the counted
tokens, as in lm-eval. Pure except for reading the files of bundle and execution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.builds.bundles.bundle import Bundle, Generation
from farm.devices.execution.raw import RawResult
from farm.results.analysis.history import wilson
from farm.results.attempt import Direction, Measurement
from farm.results.generation import TokenFindings, numbers_problem, wrong_tokens
from farm.results.outputs import FiguresByOutput, output_of, reference_of
from farm.results.runner_report import RunnerReport
from farm.suites.prompts import Likelihoods, TaskQuestion

_OUTPUT = "output"
_NAMES = {"quantized": "the quantized module", "fp32": "FP32"}


class Answers(NamedTuple):
    """Likeliest choices of a program by question."""

    chosen: dict[str, tuple[int, ...]]
    """Choices by metric: `acc` uses the logarithm of the probability, `acc_norm` that per character."""
    right: dict[str, int]
    """How many of these are right, by metric."""


class TokenLogarithms(NamedTuple):
    """Logarithms of probabilities that a program gives the scored sequences."""

    logarithms: tuple[NDArray[np.float64], ...]
    """Logarithms of the counted tokens by sample."""
    greedy: tuple[NDArray[np.bool_], ...]
    """True for each counted token that is the likeliest."""


def judge_likelihoods(bundle: Bundle, raw: RawResult, report: RunnerReport, figures: FiguresByOutput) -> TokenFindings:
    """Return `figures` completed by perplexity and choices, with their measurements.

    Only a limit, NaN or infinity without a reference, or a round of a sustained run with other tokens than the first,
    makes them wrong. Raises BundleError.
    """
    generation = bundle.manifest.generation
    if generation is None or generation.likelihoods is None:
        return TokenFindings(figures, (), (), "")
    likelihoods = generation.likelihoods
    samples = range(bundle.manifest.samples)
    token_logs = {_OUTPUT: logarithms_of(generation, [output_of(bundle, raw, sample, 0) for sample in samples])}
    for kind in bundle.manifest.references:
        token_logs[kind] = logarithms_of(generation, [reference_of(bundle, kind, sample, 0) for sample in samples])
    rows = {key: list(found) for key, found in figures.items()}
    measured, notes = list[Measurement](), list[str]()
    for kind, found in _figures_of(likelihoods, token_logs).items():
        if (0, kind) in rows:
            # The value holds for all samples together, so that the first one carries it.
            rows[0, kind][0] = msgspec.structs.replace(rows[0, kind][0], **found)
        measured += [_count_of(name, kind, value) for name, value in found.items()]
    if likelihoods.windows:
        measured += _text_measurements(likelihoods, token_logs)
        notes.append(_text_note(likelihoods, token_logs))
    if likelihoods.questions:
        measured += _task_measurements(likelihoods, token_logs)
        notes += _task_notes(likelihoods, token_logs)
    problem = numbers_problem(bundle, raw) or wrong_tokens(generation, report)
    return TokenFindings(rows, tuple(measured), tuple(filter(None, notes)), problem)


def logarithms_of(generation: Generation, rows: Sequence[NDArray[np.generic]]) -> TokenLogarithms:
    """Return the tokens that count, of float [positions, 2] by sample. Pure."""
    likelihoods = generation.likelihoods
    begins = likelihoods.first_counted if likelihoods is not None else ()
    # Row n is of token n + 1.
    counted = [
        found[begin - 1 : length - 1].astype(np.float64)
        for found, begin, length in zip(rows, begins, generation.scored, strict=True)
    ]
    return TokenLogarithms(tuple(one[:, 0] for one in counted), tuple(one[:, 0] >= one[:, 1] for one in counted))


def perplexity(likelihoods: Likelihoods, token_logs: TokenLogarithms) -> float | None:
    """Return the perplexity of the text, each token of which counts once; None where it is no number. Pure."""
    return _perplexity(likelihoods, token_logs, sum(map(len, token_logs.logarithms[: likelihoods.windows])))


def word_perplexity(likelihoods: Likelihoods, token_logs: TokenLogarithms) -> float | None:
    """Return lm-eval's `word_perplexity`: the same by words, which texts of any tokenizer have alike.

    None where it is no number, or words of the text are not among the windows. Pure.
    """
    return _perplexity(likelihoods, token_logs, likelihoods.words)


def _perplexity(likelihoods: Likelihoods, token_logs: TokenLogarithms, count: int) -> float | None:
    every = np.concatenate([np.zeros(0), *token_logs.logarithms[: likelihoods.windows]])
    if not count or not every.size or not np.all(np.isfinite(every)):
        return None
    value = float(np.exp(min(-float(np.sum(every)) / count, 700.0)))
    return value if math.isfinite(value) else None


def answers(likelihoods: Likelihoods, token_logs: TokenLogarithms) -> Answers:
    """Return the choices of a program; of equally likely ones the first, as in lm-eval. Pure."""
    chosen: dict[str, list[int]] = {metric: [] for metric in likelihoods.metrics}
    for question, sums in _sums(likelihoods, token_logs):
        by_metric = {"acc": sums, "acc_norm": sums / np.array(question.lengths, np.float64)}
        for metric, found in chosen.items():
            found.append(int(np.argmax(by_metric[metric])))
    right = {
        metric: sum(one in question.right for one, question in zip(found, likelihoods.questions, strict=True))
        for metric, found in chosen.items()
    }
    return Answers({metric: tuple(found) for metric, found in chosen.items()}, right)


def _sums(likelihoods: Likelihoods, token_logs: TokenLogarithms) -> Iterator[tuple[TaskQuestion, NDArray[np.float64]]]:
    begin = likelihoods.windows
    for question in likelihoods.questions:
        end = begin + len(question.lengths)
        sums = np.array([float(np.sum(one)) for one in token_logs.logarithms[begin:end]])
        # NaN counts as the least likely value.
        yield question, np.where(np.isnan(sums), -np.inf, sums)
        begin = end


def _figures_of(likelihoods: Likelihoods, token_logs: dict[str, TokenLogarithms]) -> dict[str, dict[str, float]]:
    """Return, for each reference, the figures that are of all samples together."""
    found: dict[str, dict[str, float]] = {kind: {} for kind in token_logs if kind != _OUTPUT}
    for kind, figures in found.items():
        own, other = (perplexity(likelihoods, token_logs[name]) for name in (_OUTPUT, kind))
        if own is not None and other is not None:
            figures["perplexity_ratio"] = own / other
        if likelihoods.questions:
            mine, theirs = (answers(likelihoods, token_logs[name]) for name in (_OUTPUT, kind))
            figures["other_choices"] = float(_differing(mine, theirs))
            figures["lost_answers"] = float(max(theirs.right[metric] - mine.right[metric] for metric in mine.right))
    return found


def _differing(mine: Answers, theirs: Answers) -> int:
    """Return how many questions have another choice, by the first metric of the task."""
    metric = next(iter(mine.chosen))
    return sum(one != other for one, other in zip(mine.chosen[metric], theirs.chosen[metric], strict=True))


def _count_of(name: str, kind: str, value: float) -> Measurement:
    unit = "1" if name == "perplexity_ratio" else "count"
    return Measurement(f"{name}_{kind}[0]", unit, Direction.LOWER, (value,))


def _suffix(name: str) -> str:
    return "" if name == _OUTPUT else f"_{name}"


def _text_measurements(likelihoods: Likelihoods, token_logs: dict[str, TokenLogarithms]) -> Iterator[Measurement]:
    for name, found in token_logs.items():
        if (value := perplexity(likelihoods, found)) is not None:
            yield Measurement(f"perplexity{_suffix(name)}[0]", "tokens", Direction.LOWER, (value,))
        if (value := word_perplexity(likelihoods, found)) is not None:
            yield Measurement(f"word_perplexity{_suffix(name)}[0]", "words", Direction.LOWER, (value,))
    likeliest = np.concatenate(token_logs[_OUTPUT].greedy[: likelihoods.windows])
    yield Measurement("greedy_share[0]", "1", Direction.HIGHER, (float(np.mean(likeliest)),))


def _text_note(likelihoods: Likelihoods, token_logs: dict[str, TokenLogarithms]) -> str:
    values = {name: perplexity(likelihoods, found) for name, found in token_logs.items()}
    if values[_OUTPUT] is None:
        return ""
    count = sum(map(len, token_logs[_OUTPUT].logarithms[: likelihoods.windows]))
    others = ", ".join(f"{_NAMES[name]} {value:.6g}" for name, value in values.items() if value and name in _NAMES)
    of_words = word_perplexity(likelihoods, token_logs[_OUTPUT])
    by_words = "" if of_words is None else f"; by its {likelihoods.words} words {of_words:.5g}"
    shown = f"{values[_OUTPUT]:.6g}, of {count} tokens{f' ({others})' if others else ''}"
    return f"perplexity of the text {shown}{by_words}"


def _task_measurements(likelihoods: Likelihoods, token_logs: dict[str, TokenLogarithms]) -> Iterator[Measurement]:
    count = len(likelihoods.questions)
    for name, found in token_logs.items():
        for metric, right in answers(likelihoods, found).right.items():
            yield Measurement(f"accuracy{_suffix(name)}[{metric}]", "1", Direction.HIGHER, (right / count,))
    yield Measurement("questions", "count", Direction.NONE, (float(count),))


def _task_notes(likelihoods: Likelihoods, token_logs: dict[str, TokenLogarithms]) -> Iterator[str]:
    count = len(likelihoods.questions)
    found = {name: answers(likelihoods, one) for name, one in token_logs.items()}
    for metric, right in found[_OUTPUT].right.items():
        low, high = wilson(right, count)
        others = "".join(f", {_NAMES[name]} {one.right[metric]}" for name, one in found.items() if name in _NAMES)
        bounds = f"{100 * low:.0f} to {100 * high:.0f} %"
        yield f"{metric}: {right} of {count} questions right ({100 * right / count:.0f} %, with 95 % {bounds}){others}"
    if "quantized" in found:
        same = count - _differing(found[_OUTPUT], found["quantized"])
        yield f"the same choice as the quantized module in {same} of {count} questions"
    if likelihoods.cut:
        many = f"{likelihoods.cut} choices do" if likelihoods.cut > 1 else "1 choice does"
        yield f"{many} not fit with all of the question: its beginning is left out, as lm-eval does"
