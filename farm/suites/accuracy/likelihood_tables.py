"""Checks of texts and tasks in a `[case.NAME.generate]` table, when the manifest is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import ConfigError
from farm.suites.accuracy.tokenizer import NAMES, tokenizer_file
from farm.suites.generate import BYTES, TOKENIZER_FILES, Generate
from farm.suites.prompts import generate_of, prefix_of

if TYPE_CHECKING:
    from farm.suites.suite import Case

_BYTES = 256
_OF_TASKS = ("other_choices", "lost_answers")
# Keys for prompts that a case with `score_text` or `task` refuses; keys that `texts` refuse.
_OF_PROMPTS = ("texts", "prompts", "prompts_file", "prompt_lengths", "score_file", "expected_file", "new", "stop")
_NOT_WORDS = ("score_file", "expected_file")
_WORDS = ("score_text", "task", "texts")
_NEEDS = {"tokenizer": _WORDS, "prefix": _WORDS, "windows": ("score_text",),
          "wikitext": ("score_text",), "documents": ("task",)}  # fmt: skip


def check_scored(manifest: Path, key: str, case: Case, vocabulary: int | None, inside: Path | None = None) -> None:
    """Raise ConfigError with the key for a text or task that cannot be scored; `vocabulary` is None for a `.pte`.

    `inside`: the folder of all files of a task.
    """
    generate = generate_of(case)
    given = {name for name in Generate.__struct_fields__ if getattr(generate, name) != getattr(Generate(), name)}
    for name, needed in _NEEDS.items():
        if name in given and not given.intersection(needed):
            raise ConfigError(manifest, f"{key}.{name}", f"is for {' or '.join(needed)}, which is missing")
    _check_limits(manifest, key, case)
    if generate.scores_likelihood:
        odd = [name for name in _OF_PROMPTS if name in given]
        problem = "is for prompts: what is told has none, and one token is generated after each sequence"
    elif generate.texts:
        odd = [name for name in _NOT_WORDS if name in given] + (["texts"] if case.pte else [])
        problem = "is not for texts, whose own logits are judged, of a program that is compiled"
    else:
        return
    if odd:
        raise ConfigError(manifest, f"{key}.{odd[0]}", problem)
    _check_tokenizer(manifest, key, case, vocabulary)
    if generate.task:
        from farm.suites.accuracy.task_format import read_task

        read_task(Path(case.folder, generate.task), inside)


def _check_tokenizer(manifest: Path, key: str, case: Case, vocabulary: int | None) -> None:
    generate = generate_of(case)
    if not generate.tokenizer:
        problem = f"is missing: name {' or '.join(NAMES)} of the model, a folder with one, or {BYTES!r}"
        raise ConfigError(manifest, f"{key}.tokenizer", problem)
    if generate.tokenizer == BYTES:
        if vocabulary is not None and vocabulary < _BYTES:
            problem = f"has {_BYTES} tokens, and the decoder {vocabulary}"
            raise ConfigError(manifest, f"{key}.tokenizer", problem)
    elif tokenizer_file(Path(case.folder, generate.tokenizer)) is None:
        kinds = " or ".join(f"*{kind}" for kind in TOKENIZER_FILES)
        problem = f"{generate.tokenizer} is neither {kinds} nor a folder with {' or '.join(NAMES)}"
        raise ConfigError(manifest, f"{key}.tokenizer", problem)
    if generate.prefix == "config" and not generate.hugging_face:
        raise ConfigError(manifest, f"{key}.prefix", "is in config.json of hugging_face, which is missing")
    for token in prefix_of(case):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            raise ConfigError(manifest, f"{key}.prefix", f"has the token {token}, which the decoder has not")


def _check_limits(manifest: Path, key: str, case: Case) -> None:
    """Raise ConfigError for a limit of a figure that `case` lacks: the limit would never decide, or never be met."""
    generate = generate_of(case)
    by_words = any(one.most_word_perplexity is not None for one in case.expect)
    if by_words and (generate.windows is not None or not generate.score_text):
        problem = "is of the words of a whole score_text: give it one, without windows"
        raise ConfigError(manifest, f"{key.removesuffix('.generate')}.expect.most_word_perplexity", problem)
    without = () if generate.task else _OF_TASKS
    if generate.scores_likelihood:
        without = (*without, "kl", "margin", "prefill_db", *(() if generate.score_text else ("perplexity_ratio",)))
    for precision, tolerance in case.tolerances.items():
        for kind, limits in (("fp32", tolerance.fp32), ("quantized", tolerance.quantized)):
            if odd := [name for name in without if getattr(limits, name) is not None]:
                place = f"{key.removesuffix('.generate')}.tolerance.{precision}.{kind}.{odd[0]}"
                raise ConfigError(manifest, place, "is a figure that this case has not: leave it out")
