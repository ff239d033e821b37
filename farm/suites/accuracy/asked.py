"""Requests to a decoder as token ids: prompts and scored sequences. Torch-free.

A text is cut into windows, and each question of a task is one sequence for each of its choices, as lm-eval does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.errors import ConfigError
from farm.suites.accuracy.wikitext import detokenized
from farm.suites.prompts import generate_of, prefix_of, prompts_of, scored_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.suites.accuracy.tokenizer import Encode
    from farm.suites.prompts import Tokens
    from farm.suites.suite import Case

    Row = tuple[int, ...]

_MOST_SEQUENCES = 2000
_MANIFEST = "suite.toml"


class TaskQuestion(msgspec.Struct, frozen=True):
    """A question of a task: a sample for each of its choices, one after the other."""

    right: tuple[int, ...]
    """Indices of the choices any of which is right."""
    lengths: tuple[int, ...]
    """Length of each choice in characters, by which lm-eval divides."""


class Likelihoods(msgspec.Struct, frozen=True):
    """Scored sequences of a bundle whose probabilities count instead of their logits."""

    # The name in manifests stays, so that bundles of farm 0.2.0 can be read.
    first_counted: tuple[int, ...] = msgspec.field(name="told")
    """Index by sample of the first token whose probability counts, as do all later ones; the tokens before it are the
    context."""
    windows: int = 0
    """So many samples, the first ones, are windows of a text."""
    questions: tuple[TaskQuestion, ...] = ()
    """The samples after these are their choices."""
    metrics: tuple[str, ...] = ()
    """Metrics of the questions: `acc`, `acc_norm`."""
    cut: int = 0
    """So many choices did not fit with all of their question, of which the beginning is left out."""
    words: int = 0
    """Words of the text as lm-eval counts them; 0 if the windows do not cover the whole text."""


class AskedTokens(NamedTuple):
    """Requests to a decoder by sample."""

    prompts: Tokens
    scored: Tokens
    """Scored sequences; () for prompts with their generated tokens."""
    likelihoods: Likelihoods | None = None


class _ScoredTokens(NamedTuple):
    sequence: Row
    first_counted: int
    is_cut: bool = False


def asked_of(case: Case, most: int, vocabulary: int) -> AskedTokens:
    """Return what `case` puts to a decoder that takes `most` tokens of a sequence, of a `vocabulary`.

    Raises as `prompts_of` does, and ConfigError for a text, a task or a tokenizer that cannot be used.
    """
    generate = generate_of(case)
    if not generate.scores_likelihood and not generate.texts:
        return AskedTokens(prompts_of(case), scored_of(case))
    from farm.suites.accuracy.tokenizer import load_tokenizer

    encode = load_tokenizer(generate.tokenizer, Path(case.folder))
    if generate.texts:
        prefix = prefix_of(case)
        texts = tuple((*prefix, *encode(text)) for text in generate.texts)
        for number, row in enumerate(texts):
            if not 1 <= len(row) <= most:
                raise _refusal(case, "texts", f"text {number} has {len(row)} tokens, expected 1 to {most}")
        _require_known(case, texts, vocabulary)
        return AskedTokens(texts, texts)
    windows, words = _text_of(case, encode, most) if generate.score_text else ([], 0)
    questions, choices, metrics = _choices_of(case, encode, most) if generate.task else ([], [], ())
    rows = [*windows, *choices]
    _require_known(case, [row.sequence for row in rows], vocabulary)
    if len(rows) > _MOST_SEQUENCES:
        many = f"there are {len(rows)} sequences to score, expected at most {_MOST_SEQUENCES}"
        if len(windows) > len(choices):
            raise _refusal(case, "score_text", f"is too long: {many}: shorten it, or name fewer windows")
        raise _refusal(case, "documents", f"is missing: {many}")
    likelihoods = Likelihoods(
        first_counted=tuple(row.first_counted for row in rows),
        windows=len(windows),
        questions=tuple(questions),
        metrics=metrics,
        cut=sum(row.is_cut for row in choices),
        words=words,
    )
    # The prompt of a window is the whole window; the prompt of a choice is its question.
    prompts = [row.sequence for row in windows] + [row.sequence[: row.first_counted] for row in choices]
    return AskedTokens(tuple(prompts), tuple(row.sequence for row in rows), likelihoods)


def _require_known(case: Case, rows: Iterable[Row], vocabulary: int) -> None:
    for row in rows:
        if beyond := [token for token in row if not 0 <= token < vocabulary]:
            problem = f"gives the token {beyond[0]}, and the decoder has 0 to {vocabulary - 1}: is it of another model?"
            raise _refusal(case, "tokenizer", problem)


def most_scored(*, context: int, prefill: int, decode: int) -> int:
    """Return how many tokens a sequence may have that is scored, all of it a prompt; `prefill` is 0 without one."""
    # The last chunk of a prompt is as wide as the method.
    whole = context // prefill * prefill if prefill else context
    return min(whole, context - decode) if decode > 1 else whole


def rolling_windows(tokens: Sequence[int], prefix: Sequence[int], most: int) -> list[tuple[tuple[int, ...], int]]:
    """Return sequences of at most `most` tokens with the index of the first counted token; each token counts once.

    As in lm-eval's rolling windows, each window begins with the last token of the window before it; the last window has
    the longest possible context. Without a `prefix` the first token is context. No window without a counted token.
    """
    whole, counted = (*prefix, *tokens), len(prefix) or 1
    if len(whole) <= counted:
        return []
    end = min(most, len(whole))
    found = [(whole[:end], counted)]
    while end < len(whole):
        next_end = min(end + most - 1, len(whole))
        begin = next_end - most
        found.append((whole[begin:next_end], end - begin))
        end = next_end
    return found


def tokenize_choice(encode: Encode, before: str, choice: str, prefix: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a question with a choice after it, and the first that is the choice's, as lm-eval does.

    Spaces at the end of a question belong to its choice: that is how tokenizers have learnt words.
    """
    question = before.rstrip()
    whole = encode(question + before[len(question) :] + choice)
    return (*prefix, *whole), len(prefix) + len(encode(question))


def _text_of(case: Case, encode: Encode, most: int) -> tuple[list[_ScoredTokens], int]:
    """Return the windows of the text of `case`, and its words as lm-eval counts them; 0 for a part of the text."""
    generate = generate_of(case)
    path = Path(case.folder, generate.score_text)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _refusal(case, "score_text", f"cannot be read: {error}") from None
    found = rolling_windows(encode(detokenized(text) if generate.wikitext else text), prefix_of(case), most)
    if not found:
        raise _refusal(case, "score_text", "has too few tokens for any to count")
    windows = [_ScoredTokens(*one) for one in found[: generate.windows]]
    # Parts between white space, an empty part at either end included.
    return windows, len(re.split(r"\s+", text)) if len(windows) == len(found) else 0


def _choices_of(
    case: Case, encode: Encode, most: int
) -> tuple[list[TaskQuestion], list[_ScoredTokens], tuple[str, ...]]:
    from farm.suites.accuracy.questions import written_questions
    from farm.suites.accuracy.task_format import read_task

    generate = generate_of(case)
    task = read_task(Path(case.folder, generate.task))
    questions, rows, prefix = [], [], prefix_of(case)
    for number, question in enumerate(written_questions(task, generate.documents)):
        for choice in question.choices:
            tokens, first_own = tokenize_choice(encode, question.text, f"{task.target_delimiter}{choice}", prefix)
            over = max(0, len(tokens) - most)
            if first_own >= len(tokens):
                raise ConfigError(task.path, "doc_to_choice", f"question {number}: {choice!r} has no token of its own")
            if not first_own:
                raise _refusal(case, "prefix", f"is missing: question {number} has no token before its choices")
            if first_own - over < 1:
                many = f"a choice has {len(tokens) - first_own} tokens, expected at most {most - 1}"
                raise ConfigError(task.path, "doc_to_choice", f"question {number}: {many}")
            rows.append(_ScoredTokens(tokens[over:], first_own - over, is_cut=over > 0))
        questions.append(TaskQuestion(question.right, tuple(map(len, question.choices))))
    return questions, rows, task.metrics


def _refusal(case: Case, key: str, problem: str) -> ConfigError:
    name = getattr(generate_of(case), key)
    shown = f"{name} " if isinstance(name, str) and name else ""
    return ConfigError(Path(case.folder, _MANIFEST), f"case.{case.name}.generate.{key}", f"{shown}{problem}")
