"""Published decoders of somebody's -> the manifest of a suite with ExecuTorch's limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farm.suites.edit import toml_limits, toml_value
from farm.suites.published.upstream_limits import CONTEXT, QUESTIONS, UPSTREAM_LIMITS, UpstreamLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from farm.suites.architectures import Architecture

NEW_TOKENS = 64


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the weights of a published decoder."""

    folder: Path
    architecture: Architecture
    name: str
    """Of its case."""
    beginning: tuple[int, ...]
    """The token that its texts begin with, as its configuration says."""
    prompt: tuple[int, ...]
    """Tokens of PROMPT."""

    @property
    def limits(self) -> UpstreamLimits:
        """Return what ExecuTorch expects of it."""
        return UPSTREAM_LIMITS[self.architecture.name]

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of its cases: the one with a prompt, and the one that is told a text."""
        return (self.name, f"{self.name}_told")


@dataclass(frozen=True)
class ToldFiles:
    """Files of the user's by which perplexity and accuracy are measured; None where they are not."""

    text: Path | None = None
    """The first page of wikitext, with the marks that it has in the data set, for ExecuTorch's limits."""
    task: Path | None = None
    """hellaswag, in lm-eval's YAML."""


def write_published(folder: Path, name: str, checkpoints: Iterable[Checkpoint], told: ToldFiles) -> None:
    """Write a suite called `name` into `folder`, which is there. Raises OSError."""
    lines = [
        "# Made by farm suites published. The limits are ExecuTorch's own (1.5.1), of TestExampleLLMScript in",
        "# backends/qualcomm/tests/test_qnn_delegate.py: rates and sizes, SQNR of the logits of its prompt against the",
        "# FP32 module, perplexity of a page by its words, accuracy of ten questions. Rates are judged on attached",
        "# devices alone. Where it has no limit for logits, farm's own against the quantized module hold.",
        "[suite]",
        f"name = {toml_value(name)}",
        'description = "Published decoders, with their weights and with ExecuTorch\'s own limits"',
        'precisions = ["16a4w"]',
    ]
    for checkpoint in checkpoints:
        (folder / f"{checkpoint.name}.json").write_text(f"{json.dumps([checkpoint.prompt])}\n", encoding="utf-8")
        lines += ["", *_prompted(checkpoint), *_told(checkpoint, told)]
    (folder / "suite.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prompted(checkpoint: Checkpoint) -> Iterator[str]:
    limits, name = checkpoint.limits, checkpoint.name
    file = f"{name}.json"
    yield from _case(checkpoint, name, {"prompts_file": file, "score_file": file, "new": NEW_TOKENS})
    if limits.sqnr_db is not None:
        yield f"[case.{name}.tolerance.{checkpoint.architecture.recipe}]"
        yield f"fp32 = {toml_limits({'sqnr_db': limits.sqnr_db})}"
    whole = [*_parts(checkpoint), f"most_pte_bytes = {limits.pte_bytes:_}"]
    for soc, rate in limits.rates.items():
        yield from (f"[[case.{name}.expect]]", f"socs = {toml_value([soc])}", f"least_decode_rate = {float(rate)}")
        yield from whole
    yield from (f"[[case.{name}.expect]]", *whole)


def _parts(checkpoint: Checkpoint) -> list[str]:
    """Return what is expected of a program in several contexts: an operator of the CPU between every two."""
    shards = checkpoint.architecture.shards
    if shards == 1:
        return []
    return [f"partitions = {shards}", f"fallback_ops = {toml_value({'llama.fallback.default': shards - 1})}"]


def _told(checkpoint: Checkpoint, told: ToldFiles) -> Iterator[str]:
    limits, name = checkpoint.limits, checkpoint.names[1]
    asked, expected = dict[str, object](), list[str]()
    if told.text is not None and limits.word_perplexity is not None:
        asked |= {"score_text": str(told.text.resolve()), "wikitext": True}
        expected.append(f"most_word_perplexity = {float(limits.word_perplexity)}")
    if told.task is not None and limits.acc_norm is not None:
        asked |= {"task": str(told.task.resolve()), "documents": QUESTIONS}
        expected.append(f"least_accuracy = {toml_limits({'acc_norm': limits.acc_norm})}")
    if asked:
        beginning = {"prefix": list(checkpoint.beginning)} if checkpoint.beginning else {}
        yield ""
        yield from _case(checkpoint, name, {"tokenizer": str(checkpoint.folder), **beginning, **asked})
        yield from (f"[[case.{name}.expect]]", *_parts(checkpoint), *expected)


def _case(checkpoint: Checkpoint, name: str, asked: Mapping[str, object]) -> Iterator[str]:
    generate = {
        "architecture": checkpoint.architecture.name,
        "hugging_face": str(checkpoint.folder),
        "mode": "kv",
        "context": CONTEXT,
        **asked,
    }
    yield f"[case.{name}]"
    yield f"precisions = {toml_value([checkpoint.architecture.recipe])}"
    if (shards := checkpoint.architecture.shards) > 1:
        yield f"features = {toml_value({'use_multi_contexts': True, 'split': shards})}"
    yield f"[case.{name}.generate]"
    yield from (f"{key} = {toml_value(value)}" for key, value in generate.items())
