"""Token ids of cases that generate or score text: prompts, tokenizers, windows of a text, choices of a task."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.errors import ConfigError, MissingToolError
from farm.suites.generate import BYTES, Generate, complete_params, find_architecture, params_of_hugging_face
from farm.suites.suite import Case

# The token ids of a case that generates text: written in its manifest, read from a file, or drawn. Torch-free.


Tokens = tuple[tuple[int, ...], ...]
"""Token ids by prompt."""

HUGGING_FACE_CONFIG = "config.json"
# The seed of prompt n is the case's seed plus n times this step, as for input tensors.
_SEED_STEP = 1000


def decoder_params(case: Case) -> dict[str, Any]:
    """Return the whole `params.json` of the decoder that `case` generates with; {} for a `.pte`, which has its own.

    Raises OSError for an unreadable file, ValueError for other content than a JSON object, UnknownNameError.
    """
    generate = generate_of(case)
    if case.pte:
        return {}
    return complete_params(find_architecture(generate.architecture), _given(generate, Path(case.folder)))


def _given(generate: Generate, folder: Path) -> dict[str, Any]:
    if generate.hugging_face:
        return params_of_hugging_face(_read_object(folder / generate.hugging_face / HUGGING_FACE_CONFIG))
    return _read_object(folder / generate.params_file) if generate.params_file else generate.params


def prompts_of(case: Case) -> Tokens:
    """Return the prompts of `case`, one for each sample.

    Raises OSError for an unreadable file, ValueError with the reason for a file without token ids.
    """
    generate = generate_of(case)
    if generate.prompts_file:
        return read_tokens(Path(case.folder, generate.prompts_file))
    if generate.prompts:
        return generate.prompts
    vocabulary = int(decoder_params(case)["vocab_size"])
    return tuple(
        _drawn(length, vocabulary, case.seed + _SEED_STEP * index)
        for index, length in enumerate(generate.prompt_lengths)
    )


def prefix_of(case: Case) -> tuple[int, ...]:
    """Return the tokens at the beginning of each text and question. Raises as `prompts_of` does."""
    generate = generate_of(case)
    if generate.prefix != "config":
        return generate.prefix
    config = _read_object(Path(case.folder, generate.hugging_face, HUGGING_FACE_CONFIG))
    for key in ("bos_token_id", "eos_token_id"):
        given = config.get(key)
        for token in given if isinstance(given, list) else [given]:
            if type(token) is int and token >= 0:
                return (token,)
    return ()


def scored_of(case: Case) -> Tokens:
    """Return the sequences whose logits are judged; () for prompts followed by generated tokens.

    Raises as `prompts_of` does.
    """
    name = generate_of(case).score_file
    return read_tokens(Path(case.folder, name)) if name else ()


def expected_of(case: Case) -> Tokens:
    """Return the required tokens by prompt; () if references decide. Raises as `prompts_of` does."""
    name = generate_of(case).expected_file
    return read_tokens(Path(case.folder, name)) if name else ()


def generate_of(case: Case) -> Generate:
    """Return the generation settings of `case`. Raises ValueError for a case without them."""
    if case.generate is None:
        raise ValueError(f"{case.suite}/{case.name} generates no text")
    return case.generate


def read_tokens(path: Path) -> Tokens:
    """Return the token ids in a `.json` file (a list of lists) or `.npy` file (a row each, -1 after its end).

    Raises OSError, and ValueError with the problem.
    """
    return _read_rows(path) if path.suffix == ".npy" else _read_lists(path)


def _read_lists(path: Path) -> Tokens:
    if path.suffix != ".json":
        raise ValueError("is neither a .json nor a .npy file")
    try:
        lists = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(lists, list) or not all(isinstance(row, list) for row in lists):
        raise ValueError("has no list of lists of token ids")
    if odd := [token for row in lists for token in row if type(token) is not int]:
        raise ValueError(f"has {str(odd[0])[:40]!r} among the token ids, which are whole numbers")
    return tuple(tuple(row) for row in lists)


def _read_rows(path: Path) -> Tokens:
    import numpy as np

    try:
        rows = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise ValueError(f"is no array of token ids: {error}") from None
    if not isinstance(rows, np.ndarray) or rows.ndim not in (1, 2) or rows.dtype.kind not in "iu":
        raise ValueError("has no whole numbers in one or two dimensions")
    return tuple(_before_end([int(token) for token in row]) for row in np.atleast_2d(rows))


def _before_end(row: list[int]) -> tuple[int, ...]:
    end = row.index(-1) if -1 in row else len(row)
    if any(token != -1 for token in row[end:]):
        raise ValueError("has token ids after a -1, which ends a row")
    return tuple(row[:end])


def _drawn(length: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    # Only `random()` of Python's generator is equal in every version for a seed; a text as seed distinguishes -1
    # from 1.
    generator = random.Random(f"prompt {seed}")  # noqa: S311 - no secret
    return tuple(int(generator.random() * vocabulary) for _ in range(length))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} has no JSON object")  # noqa: TRY004 - of the content
    return found


# Texts that a model is asked about: tokenizers, windows of a text, choices of a task.


# Text -> token ids, by the tokenizer of a model in a local file, or as the bytes of the text. Torch-free.
#
# The libraries are ExecuTorch's own (`tokenizers`, `sentencepiece`, `tiktoken`), and are imported where a file wants
# one.


NAMES = ("tokenizer.json", "tokenizer.model")
"""File names of tokenizers in a folder, in the order of search."""

Encode = Callable[[str], list[int]]
"""Token ids of a text, without any that mark its beginning or end."""

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def tokenizer_file(path: Path) -> Path | None:
    """Return the tokenizer's file: `path` itself, or a file in the folder `path`; None without a tokenizer."""
    found = next((path / name for name in NAMES if (path / name).is_file()), None) if path.is_dir() else path
    return found if found is not None and found.is_file() else None


def load_tokenizer(name: str, folder: Path) -> Encode:
    """Return what makes tokens of a text: `name` is BYTES, or a file or folder in `folder`.

    Raises ConfigError for a file that is no tokenizer, MissingToolError where its library is missing.
    """
    if name == BYTES:
        return lambda text: list(text.encode())
    path = tokenizer_file(folder / name)
    if path is None:
        raise ConfigError(folder / name, "", f"is no tokenizer: give {' or '.join(NAMES)}, or a folder with one")
    try:
        if path.suffix == ".json":
            return _of_hugging_face(path)
        content = path.read_bytes()
        return _of_tiktoken(content) if _TIKTOKEN_LINE.match(content) else _of_sentencepiece(content)
    except ImportError as error:
        problem = f"the tokenizer {path.name} needs {error.name}, which is missing here"
        install = "install farm with the extra 'build' (pip install 'snapdragon-farm[build]')"
        raise MissingToolError(f"{problem}: {install}") from error
    except Exception as error:  # a damaged file leads the libraries to errors of any kind
        raise ConfigError(path, "", f"is no tokenizer that can be read: {error}") from error


def _of_hugging_face(path: Path) -> Encode:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # Settings from training would truncate or pad texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _of_sentencepiece(content: bytes) -> Encode:
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
    return lambda text: list(processor.encode(text, out_type=int))


def _of_tiktoken(content: bytes) -> Encode:
    """Return the encoder of Llama 3's ranks, with the pattern of ExecuTorch's tokenizers."""
    import tiktoken
    from pytorch_tokenizers.constants import CL100K_PAT_STR

    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines())}
    encoding = tiktoken.Encoding("llama3", pat_str=CL100K_PAT_STR, mergeable_ranks=ranks, special_tokens={})
    return lambda text: list(encoding.encode_ordinary(text))


# Pages of wikitext as data sets have them, with marks and spaces of their own -> text as people write it.
#
# lm-eval scores a page without them, and counts its words with them (its task `wikitext`, version 2).


_NUMBER_MARKS = "-,."
_PUNCTUATION = ":;.!?,"
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
_HEADINGS = (4, 3, 2)
_SPACED = ((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))


def detokenized(page: str) -> str:
    """Return `page` as lm-eval scores it: each rule over all of the page, in its order. Pure."""
    text = page.replace("s '", "s'")
    for mark in _NUMBER_MARKS:
        text = text.replace(f" @{mark}@ ", mark)
    for mark in _PUNCTUATION:
        text = text.replace(f" {mark} ", f"{mark} ")
    for begin, end in _PAIRS:
        inside = rf"{re.escape(begin)}\s*([^{re.escape(end)}]*?)\s*{re.escape(end)}"
        text = re.sub(inside, rf"{begin}\1{end}", text)
    for length in _HEADINGS:
        text = text.replace(" ".join("=" * length), "=" * length)
    for spaced, written in _SPACED:
        text = text.replace(spaced, written)
    return text


# Requests to a decoder as token ids: prompts and scored sequences. Torch-free.
#
# A text is cut into windows, and each question of a task is one sequence for each of its choices, as lm-eval does.


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    from farm.suites.tasks import read_task, written_questions

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
