"""Generated text: plausibility of its report, and agreement of its tokens with its logits.

`outputs.py` judges the logits and their figures, `generation_rates.py` the times. Pure except for reading the files of
bundle and execution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.base.errors import BundleError
from farm.builds.bundles.bundle import Bundle, Generation, read_tensor
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Cause, Direction, Ending, Measurement, Stage, Verdict, failed
from farm.results.numerics import Figures, compare
from farm.results.outputs import FiguresByOutput, output_of, reference_of
from farm.results.runner_report import Generated, RunnerReport
from farm.suites.figures import COUNTERS, log_softmax

EXPECTED = "expected"
"""Key in the tokens of a manifest: the exact tokens that a ready program has to generate."""
_SCORED_INPUT = 1


class TokenFindings(NamedTuple):
    """Findings about the tokens of an execution."""

    figures: FiguresByOutput
    """Given figures, completed by the figures of the tokens."""
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]
    problem: str
    """Reason why the tokens are wrong without any limit; "" for none."""


def report_problem(generation: Generation, report: RunnerReport) -> str:
    """Return a contradiction in the runner's report of tokens, or between report and request; "" for none. Pure.

    A time to fill adds rounds: the prompts again, in the same order. The end of the time may cut only an entry after
    the first round.
    """
    prompts = len(generation.prompt_tokens)
    if len(report.generated) < prompts:
        return f"it has tokens of {len(report.generated)} of {prompts} prompts"
    for number, entry in enumerate(report.generated):
        if entry.line != number % prompts:
            return f"generated[{number}] is of prompt {entry.line}, expected {number % prompts}"
        if problem := _entry_problem(generation, entry, is_first_round=number < prompts):
            return f"generated[{number}] {problem}"
    for inference, entry in zip(report.inferences, report.generated, strict=False):
        steps = entry.steps_ns or ((entry.total_ns,) if entry.total_ns is not None else ())
        if inference.iterations_ns != steps:
            return f"inferences[{inference.line}] has other durations than the steps of its prompt"
    return ""


def untimed_problem(generation: Generation, report: RunnerReport) -> str:
    """Return the same for a runner without a report of calls, whose tokenizer decides the end of a text. Pure."""
    prompts = len(generation.prompt_tokens)
    if [entry.line for entry in report.generated] != list(range(prompts)):
        return f"it has tokens of {len(report.generated)} of {prompts} prompts"
    for number, entry in enumerate(report.generated):
        ended = msgspec.structs.replace(generation, stop=entry.tokens[-1:]) if entry.ended == "stop" else generation
        if problem := _tokens_problem(ended, entry, is_first_round=True):
            return f"generated[{number}] {problem}"
    return ""


def _entry_problem(generation: Generation, entry: Generated, *, is_first_round: bool) -> str:
    asked = generation.prompt_tokens[entry.line]
    if entry.prompt_tokens != asked:
        return f"has a prompt of {entry.prompt_tokens} tokens, expected {asked}"
    return (
        _tokens_problem(generation, entry, is_first_round=is_first_round)
        or _calls_problem(generation, entry)
        or _times_problem(entry, is_first_round=is_first_round)
    )


def _tokens_problem(generation: Generation, entry: Generated, *, is_first_round: bool) -> str:
    tokens, stop = entry.tokens, set(generation.stop)
    if beyond := [token for token in tokens if token >= generation.vocabulary]:
        return f"has token {beyond[0]}, the vocabulary has {generation.vocabulary}"
    if len(tokens) > generation.new:
        return f"has {len(tokens)} tokens, {generation.new} were asked for"
    # The last token is chosen, and need not be in the cache.
    if entry.prompt_tokens + len(tokens) > generation.context + 1:
        return f"has {len(tokens)} tokens after {entry.prompt_tokens}, the context has {generation.context}"
    if stop.intersection(tokens[:-1]):
        return "has tokens after a stop token"
    ends = {
        "new": len(tokens) == generation.new,
        "stop": bool(tokens) and tokens[-1] in stop,
        "context": bool(tokens) and entry.prompt_tokens + len(tokens) > generation.context - generation.decode,
        "seconds": not is_first_round,
    }
    return "" if ends[entry.ended] else f"ended by {entry.ended!r} with {len(tokens)} tokens"


def _calls_problem(generation: Generation, entry: Generated) -> str:
    calls, steps, tokens = len(entry.prefill_ns), len(entry.steps_ns), len(entry.tokens)
    if not tokens:
        # The time was over before the prompt was.
        return "has steps and no token" if steps else ""
    least = math.ceil(entry.prompt_tokens / max(generation.prefill, generation.decode, 1))
    if not least <= calls <= entry.prompt_tokens:
        return f"has {calls} calls for a prompt of {entry.prompt_tokens} tokens"
    follow = tokens - 1
    if steps > follow or (steps < follow and generation.decode <= 1):
        return f"has {steps} steps for {follow} tokens after the first"
    return "has tokens after the first, and no step" if follow and not steps else ""


def _times_problem(entry: Generated, *, is_first_round: bool) -> str:
    if entry.total_ns is None or entry.first_token_ns is None:
        return "does not report its time" if is_first_round or entry.tokens else ""
    if not sum(entry.prefill_ns) <= entry.first_token_ns <= entry.total_ns:
        return "has a first token before its prompt, or after its end"
    if sum(entry.prefill_ns) + sum(entry.steps_ns) > entry.total_ns:
        return "has steps that took longer than all of it"
    return ""


def judge_tokens(bundle: Bundle, raw: RawResult, report: RunnerReport, figures: FiguresByOutput) -> TokenFindings:
    """Return `figures` completed from the tokens, and the problem of wrong tokens.

    Wrong without any limit are: NaN or infinity among logits without a reference; tokens that differ from the expected
    ones of a ready program; a token that is not the greatest of the program's own logits for the same tokens; a round
    of a sustained run with other tokens than the first. A token that differs from a reference's gives a note and a
    measurement. `report_problem` has accepted the report before. Raises BundleError.
    """
    generation = bundle.manifest.generation
    if generation is None:
        return TokenFindings(figures, (), (), "")
    # A ready program may have no logits that are wanted.
    prompts = len(generation.prompt_tokens) if bundle.manifest.outputs else 0
    looks = [_Scored(bundle, raw, entry) for entry in report.generated[:prompts]]
    rows = {key: list(found) for key, found in figures.items()}
    margins: list[float] = []
    for look in looks:
        for (index, kind), found in rows.items():
            found[look.sample] = look.with_perplexity(found[look.sample], index, kind)
        if (0, "fp32") in rows and (shares := look.margins()):
            margins += shares
            found = rows[0, "fp32"]
            found[look.sample] = msgspec.structs.replace(found[look.sample], margin=min(shares))
        key = next((key for key in ((0, "quantized"), (0, "fp32")) if key in rows), None)
        if key is not None and generation.prefill and (agreement := look.prefill_db()) is not None:
            rows[key][look.sample] = msgspec.structs.replace(rows[key][look.sample], prefill_db=agreement)
    measured = [*_same_tokens(generation, report)]
    if margins:
        measured.append(Measurement("margin_fp32[0]", "1", Direction.HIGHER, tuple(margins)))
    perplexities = [value for look in looks if (value := look.perplexity(look.output(0))) is not None]
    # An expectation is for every prompt.
    if perplexities and not any(map(math.isnan, perplexities)):
        measured.append(Measurement("perplexity[0]", "tokens", Direction.LOWER, tuple(perplexities)))
    problem = numbers_problem(bundle, raw) or wrong_tokens(generation, report)
    problem = problem or next((text for look in looks if (text := look.disagreement())), "")
    return TokenFindings(rows, tuple(measured), _notes(generation, report), problem)


class _Scored:
    """Prompt of an execution: its logits, its tokens, and the scored sequence."""

    def __init__(self, bundle: Bundle, raw: RawResult, entry: Generated) -> None:
        self._bundle, self._raw, self.sample, self._entry = bundle, raw, entry.line, entry
        self._sequence = _scored_sequence(bundle, self.sample)
        # A sequence of the user is independent of the generated text.
        self._is_continued = self._sequence[: entry.prompt_tokens] == _ids(bundle, self.sample, 0)

    def output(self, index: int) -> NDArray[np.float64]:
        """Return the logits that count, [positions, vocabulary]."""
        return self._of(output_of(self._bundle, self._raw, self.sample, index))

    def _reference(self, kind: str, index: int) -> NDArray[np.float64]:
        return self._of(reference_of(self._bundle, kind, self.sample, index))

    def _of(self, logits: NDArray[np.generic]) -> NDArray[np.float64]:
        return logits[: len(self._sequence)].astype(np.float64)

    def perplexity(self, logits: NDArray[np.float64]) -> float | None:
        """Return the perplexity of the scored sequence by `logits`; NaN where it is no number, None for one token."""
        following = self._sequence[1:]
        if not following:
            return None
        with np.errstate(invalid="ignore"):
            chosen = log_softmax(logits[: len(following)])[np.arange(len(following)), following]
        # The bound stands for infinity, which a token that is ruled out gives. The minimum of NumPy keeps NaN.
        return float(np.exp(np.minimum(-np.mean(chosen), 700.0)))

    def with_perplexity(self, figures: Figures, index: int, kind: str) -> Figures:
        """Return `figures` of an output against a reference with the ratio of their perplexities."""
        actual, reference = self.perplexity(self.output(index)), self.perplexity(self._reference(kind, index))
        if actual is None or reference is None or math.isnan(actual) or math.isnan(reference):
            return figures
        return msgspec.structs.replace(figures, perplexity_ratio=actual / reference)

    def prefill_db(self) -> float | None:
        """Return the SQNR of the prompt's logits by prefill against those by decode; inf where they are equal."""
        if len(self._bundle.manifest.outputs) < 2:
            return None
        ahead, alone = (self.output(index)[: self._entry.prompt_tokens] for index in (0, 1))
        agreement: float | None = compare(ahead, alone).sqnr_db
        return agreement

    def _chosen(self) -> Iterator[tuple[int, int, int]]:
        """Yield place, row and token of each choice after the scored tokens."""
        begin = self._entry.prompt_tokens
        for place, token in enumerate(self._entry.tokens if self._is_continued else ()):
            row = begin + place - 1
            # After a differing token the logits belong to another text.
            if row >= len(self._sequence) or self._sequence[begin : row + 1] != self._entry.tokens[:place]:
                return
            yield place, row, token

    def margins(self) -> list[float]:
        """Return the FP32 probability of each chosen token, divided by the greatest probability."""
        logits = self._reference("fp32", 0)
        return [float(np.exp(logits[row, token] - np.max(logits[row]))) for _, row, token in self._chosen()]

    def disagreement(self) -> str:
        """Return the token that disagrees with the program's own logits; "" for none."""
        logits = self.output(0)
        for place, row, token in self._chosen():
            best = int(np.argmax(logits[row]))
            if not logits[row, token] >= logits[row, best]:
                return (
                    f"prompt {self.sample}: token {place + 1} that was generated is {token}, and its own logits "
                    f"for the same text have {best} there, by {logits[row, best] - logits[row, token]:.4g}"
                )
        return ""


def _scored_sequence(bundle: Bundle, sample: int) -> tuple[int, ...]:
    """Return the tokens whose logits count."""
    generation = bundle.manifest.generation
    sequence = _ids(bundle, sample, _SCORED_INPUT)
    return sequence[: generation.scored[sample]] if generation is not None else ()


def _ids(bundle: Bundle, sample: int, index: int) -> tuple[int, ...]:
    if index >= len(bundle.manifest.inputs):
        return ()
    try:
        found = read_tensor(bundle.input_files(sample)[index], bundle.manifest.inputs[index]).ravel()
    except (OSError, ValueError) as error:
        raise BundleError.damaged(bundle.manifest.key, error) from None
    return tuple(token for token in map(int, found) if token >= 0)


def _same_tokens(generation: Generation, report: RunnerReport) -> Iterator[Measurement]:
    """Yield, for each reference, which share of its tokens was generated before the first that differs."""
    for kind, texts in generation.tokens.items():
        metric = f"same_tokens_{kind}"
        if (counter := COUNTERS.get(metric)) is None:
            continue
        shares = [
            _leading(entry.tokens, wanted) / len(wanted)
            for entry, wanted in zip(report.generated, texts, strict=False)
            if wanted
        ]
        if shares:
            yield Measurement(metric, counter.unit, counter.direction, tuple(shares), exact=counter.exact)


def _leading(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens are the same before the first that differs."""
    pairs = zip(tokens, wanted, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _notes(generation: Generation, report: RunnerReport) -> tuple[str, ...]:
    """Return, for each reference, the first prompt whose tokens are others."""
    notes = []
    for kind, name in (("quantized", "the quantized module"), ("fp32", "the FP32 module")):
        differing = [
            (entry, wanted, place)
            for entry, wanted in zip(report.generated, generation.tokens.get(kind, ()), strict=False)
            if (place := _leading(entry.tokens, wanted)) < min(len(entry.tokens), len(wanted))
        ]
        if differing:
            entry, wanted, place = differing[0]
            many = f"; so in {len(differing)} of {len(generation.prompt_tokens)} prompts" if len(differing) > 1 else ""
            notes.append(
                f"prompt {entry.line}: token {place + 1} of {len(wanted)} is {entry.tokens[place]}, {name} chooses "
                f"{wanted[place]}{many}"
            )
    return tuple(notes)


def numbers_problem(bundle: Bundle, raw: RawResult) -> str:
    """Return the first output without a reference that has NaN or infinity among its numbers; "" for none.

    Figures judge outputs with a reference. A logit of -inf is a token that the program rules out.
    """
    manifest = bundle.manifest
    if manifest.references:
        return ""
    for sample, index in itertools.product(range(manifest.samples), range(len(manifest.outputs))):
        rows = output_of(bundle, raw, sample, index)
        if np.any(np.isnan(rows) | (rows == np.inf)):
            return f"output {index} of prompt {sample} has NaN or infinity among its numbers"
    return ""


def wrong_tokens(generation: Generation, report: RunnerReport) -> str:
    """Return the token that differs from the expected one or from the first round; "" for none. Pure."""
    prompts = len(generation.prompt_tokens)
    for entry, wanted in zip(report.generated, generation.tokens.get(EXPECTED, ()), strict=False):
        if entry.tokens != wanted:
            place = _leading(entry.tokens, wanted)
            return (
                f"prompt {entry.line}: token {place + 1} is {_at(entry.tokens, place)}, expected {_at(wanted, place)}"
            )
    for number, entry in enumerate(report.generated[prompts:]):
        first = report.generated[entry.line].tokens
        place = _leading(entry.tokens, first)
        if place < len(entry.tokens) or (entry.ended != "seconds" and len(entry.tokens) != len(first)):
            return (
                f"prompt {entry.line}: round {number // prompts + 2} gave {_at(entry.tokens, place)} as token "
                f"{place + 1}, the first round {_at(first, place)}"
            )
    return ""


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "none"


def with_tokens(ending: Ending, findings: TokenFindings) -> Ending:
    """Return `ending` with the findings of the tokens: failed for wrong tokens."""
    ending = msgspec.structs.replace(ending, notes=(*ending.notes, *findings.notes))
    if not findings.problem:
        return ending
    if ending.verdict is not Verdict.PASSED:
        return msgspec.structs.replace(ending, notes=(*ending.notes, findings.problem))
    return ending.ended_as(failed(Stage.NUMERICS, findings.problem, Cause.NUMERICS))
