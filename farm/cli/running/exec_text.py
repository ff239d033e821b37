"""`farm exec --prompt`: a program that generates text, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.report.model import format as fmt
from farm.report.terminal.layout import SIMULATED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.builds.bundles.bundle import Generation
    from farm.replay.generation import GeneratingProgram, GenerationOutcome
    from farm.replay.one_off import OneOffOutcome
    from farm.results.runner_report import Generated
    from farm.suites.suite import Job

_ENDED = {
    "stop": ", the last of them a stop token",
    "context": ", then the context was full",
    "seconds": ", then the time was over",
    "early": ", then it ended early",
}
_LINE = 78
_WHOLE = 512
"""Tokens of one prompt that are printed."""


def lines(program: GeneratingProgram, outcome: GenerationOutcome, seconds: int | None) -> list[str]:
    """Return the generated tokens and their times, for a terminal."""
    from farm.report.model.generation import generation_of
    from farm.report.terminal.generation import generation_lines

    one, generation = outcome.one, program.generation
    attempt = one.attempt
    if attempt is None:
        return ["interrupted"]
    by = f"prompts by {generation.prefill} at a time" if generation.prefill else "prompts token by token"
    found = [program.job.id, f"  on {one.kind} device {attempt.device}"]
    found += [f"  {attempt.verdict}: {attempt.reason}"] if attempt.reason else []
    found += [f"  {generation.mode}: context {generation.context}, vocabulary {generation.vocabulary}, {by}"]
    host_time = "host time" if one.kind == "virtual" else ""
    # Later rounds repeat the prompts of the first round.
    for entry in outcome.generated[: len(program.prompts)]:
        found += ["", *_prompt_lines(entry, generation)]
    if rounds := outcome.generated[len(program.prompts) :]:
        found += ["", f"  then {fmt.plural(len(rounds), 'more prompt')}, the same in turns"]
    facts = {} if seconds is None else {"seconds": str(seconds)}
    if figures := generation_of(attempt, facts):
        found += ["", *(f"  {line}" for line in generation_lines(figures, host_time))]
    notes = [f"note: {note}" for note in attempt.notes]
    return [*found, "", *notes, *([SIMULATED] if one.kind == "virtual" else []), f"report: {one.report}"]


def _ended(entry: Generated, generation: Generation) -> str:
    from farm.replay.generation import is_cut_short

    return "early" if is_cut_short(entry, generation) else entry.ended


def _prompt_lines(entry: Generated, generation: Generation) -> Iterator[str]:
    count = fmt.plural(len(entry.tokens), "token")
    taken = fmt.plural(entry.prompt_tokens, "token")
    yield f"  prompt {entry.line} ({taken}): {count}{_ENDED.get(_ended(entry, generation), '')}"
    first, rate = _milliseconds(entry.first_token_ns), _rate(entry)
    if first is not None:
        after = f", {fmt.rate(rate)} tokens/s after it" if rate is not None else ""
        yield f"    first token after {fmt.milliseconds(first)} ms{after}"
    row = "   "
    for token in entry.tokens[:_WHOLE]:
        if len(row) + len(str(token)) + 1 > _LINE:
            yield row
            row = "   "
        row += f" {token}"
    if entry.tokens:
        yield row
    if len(entry.tokens) > _WHOLE:
        yield f"    ... and {len(entry.tokens) - _WHOLE} more: --json or --output has all"


def data(program: GeneratingProgram, outcome: GenerationOutcome) -> dict[str, object]:
    """Return the generated tokens and the time of every step, for JSON."""
    generation = program.generation
    return {
        **run_data(program.job, outcome.one),
        "mode": generation.mode,
        "context": generation.context,
        "vocabulary": generation.vocabulary,
        "prompts": [list(prompt) for prompt in program.prompts],
        "generated": [
            {
                "prompt": entry.line,
                "prompt_tokens": entry.prompt_tokens,
                "tokens": entry.tokens,
                "ended": _ended(entry, generation),
                "first_token_ms": _milliseconds(entry.first_token_ns),
                "total_ms": _milliseconds(entry.total_ns),
                "prefill_tokens_per_second": _prefill_rate(entry),
                "decode_tokens_per_second": _rate(entry),
                "prefill_ns": entry.prefill_ns,
                "steps_ns": entry.steps_ns,
            }
            for entry in outcome.generated
        ],
    }


def run_data(job: Job, one: OneOffOutcome) -> dict[str, object]:
    """Return a run of one job for JSON."""
    return {
        "job": job.id,
        "run": one.run_id,
        "exit_code": one.exit_code,
        "device_kind": one.kind,
        "attempt": one.attempt,
        "report": str(one.report),
    }


def _milliseconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _prefill_rate(entry: Generated) -> float | None:
    return None if entry.first_token_ns is None else entry.prompt_tokens * 1e9 / entry.first_token_ns


def _rate(entry: Generated) -> float | None:
    """Return tokens per second after the first token; the runner's work between calls counts as well."""
    if entry.first_token_ns is None or entry.total_ns is None or len(entry.tokens) < 2:
        return None
    took = entry.total_ns - entry.first_token_ns
    return (len(entry.tokens) - 1) * 1e9 / took if took > 0 else None
