"""Times that ExecuTorch's `qnn_llama_runner` prints: a line `PyTorchObserver {...}`, read as hostile text. Pure.

ExecuTorch 1.5, extension/llm/runner/stats.h: stamps of a clock, in whole milliseconds.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

_LINE = re.compile(r"PyTorchObserver (\{[^\n]{1,4096}\})")
_Count = Annotated[int, Meta(ge=0, le=2**24)]
_Stamp = Annotated[int, Meta(ge=0, le=2**53)]
# Tolerance between two clocks, of which one has whole milliseconds.
_SLACK, _SLACK_MS = 1.2, 1000


class ObservedError(ValueError):
    """Missing or implausible line of times."""


class Observed(msgspec.Struct, frozen=True):
    """The times of one prompt."""

    prompt_tokens: _Count
    generated_tokens: _Count
    """After the first, which the prompt gives."""
    model_load_start_ms: _Stamp
    model_load_end_ms: _Stamp
    inference_start_ms: _Stamp
    prompt_eval_end_ms: _Stamp
    first_token_ms: _Stamp
    inference_end_ms: _Stamp

    @property
    def load_ms(self) -> int:
        """Time to load program and tokenizer."""
        return self.model_load_end_ms - self.model_load_start_ms

    @property
    def first_ms(self) -> int:
        """From the prompt to the first token."""
        return self.first_token_ms - self.inference_start_ms

    @property
    def decode_ms(self) -> int:
        """Time of the tokens after the first."""
        return self.inference_end_ms - self.prompt_eval_end_ms


def read_observed(log: str, prompt_tokens: int, most_new: int, seconds: float) -> Observed:
    """Return the last such line of `log`, of a process that took `seconds`. Raises ObservedError.

    `most_new`: so many tokens were asked for.
    """
    lines = _LINE.findall(log)
    if not lines:
        raise ObservedError("it printed no PyTorchObserver line")
    try:
        found = msgspec.json.decode(lines[-1], type=Observed)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ObservedError(f"its PyTorchObserver line is refused: {error}") from None
    if problem := _problem(found, prompt_tokens, most_new, seconds):
        raise ObservedError(f"its PyTorchObserver line is refused: {problem}")
    return found


def _problem(found: Observed, prompt_tokens: int, most_new: int, seconds: float) -> str:
    if found.prompt_tokens != prompt_tokens:
        return f"it has a prompt of {found.prompt_tokens} tokens, expected {prompt_tokens}"
    if found.generated_tokens >= most_new:
        return f"it has {found.generated_tokens} tokens after the first, and {most_new} were asked for in all"
    begin, first, decoding, end = (
        found.inference_start_ms, found.first_token_ms, found.prompt_eval_end_ms, found.inference_end_ms,
    )  # fmt: skip
    if not (begin <= first <= end and begin <= decoding <= end and found.load_ms >= 0):
        return "its stamps are in no order"
    claimed = found.load_ms + end - begin
    if claimed > seconds * 1000 * _SLACK + _SLACK_MS:
        return f"it claims {claimed / 1000:.1f} s of work, and the program ran for {seconds:.1f} s"
    return ""
