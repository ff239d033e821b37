"""Hugging Face folders -> a suite of published decoders with ExecuTorch's limits. Torch-free."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farm.suites.accuracy.tokenizer import load_tokenizer, tokenizer_file
from farm.suites.architectures import ARCHITECTURES, params_of_hugging_face
from farm.suites.edit import toml_limits, toml_value
from farm.suites.prompts import HUGGING_FACE_CONFIG
from farm.suites.published.upstream_limits import CONTEXT, PROMPT, QUESTIONS, UPSTREAM_LIMITS, UpstreamLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from farm.suites.architectures import Architecture

NEW_TOKENS = 64
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the weights of a published decoder."""

    folder: Path
    architecture: Architecture
    name: str
    """Of its case."""
    beginning: tuple[int, ...]
    """The token that its texts begin with, as its configuration says."""

    @property
    def limits(self) -> UpstreamLimits:
        """Return what ExecuTorch expects of it."""
        return UPSTREAM_LIMITS[self.architecture.name]


@dataclass
class FoundCheckpoints:
    """What is in a folder of checkpoints."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Of other checkpoints: which, and why."""


def find_checkpoints(folder: Path) -> FoundCheckpoints:
    """Return the published decoders whose weights are in `folder` or in its folders."""
    found, names = FoundCheckpoints(), list[str]()
    places = sorted({path.parent for pattern in ("", "*/") for path in folder.glob(f"{pattern}{HUGGING_FACE_CONFIG}")})
    for place in places:
        one = _checkpoint(place)
        if isinstance(one, str):
            found.left_out.append(f"{place}: {one}")
        else:
            found.checkpoints.append(one)
            names.append(one.name)
    # Two of one architecture: another training of it.
    found.checkpoints = [
        Checkpoint(one.folder, one.architecture, _slug(one.folder.name), one.beginning)
        if names.count(one.name) > 1
        else one
        for one in found.checkpoints
    ]
    return found


def _checkpoint(folder: Path) -> Checkpoint | str:
    """Return what is in a folder with a configuration, or why it cannot be used."""
    try:
        config = json.loads((folder / HUGGING_FACE_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{HUGGING_FACE_CONFIG} cannot be read: {error}"
    if not isinstance(config, dict):
        return f"{HUGGING_FACE_CONFIG} has no JSON object"
    if (architecture := _architecture(config)) is None:
        return f"a {config.get('model_type')!r} of other sizes than the decoders that ExecuTorch has limits for"
    if not any(folder.glob("*.safetensors")):
        return "no *.safetensors"
    if tokenizer_file(folder) is None:
        return "no tokenizer.json or tokenizer.model"
    begin = config.get("bos_token_id", config.get("eos_token_id"))
    beginning = (begin,) if isinstance(begin, int) else ()
    return Checkpoint(folder.resolve(), architecture, _slug(architecture.name), beginning)


def _architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the published decoder that has the sizes of a configuration."""
    sizes = params_of_hugging_face(config)
    for name in UPSTREAM_LIMITS:
        one = ARCHITECTURES[name]
        if config.get("model_type") in one.model_types and all(sizes.get(key) == one.params[key] for key in _SIZES):
            return one
    return None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:50] or "decoder"


@dataclass(frozen=True)
class ToldFiles:
    """Files of the user's by which perplexity and accuracy are measured; None where they are not."""

    text: Path | None = None
    """The first page of wikitext, with the marks that it has in the data set, for ExecuTorch's limits."""
    task: Path | None = None
    """hellaswag, in lm-eval's YAML."""


def write_published(folder: Path, name: str, checkpoints: Iterable[Checkpoint], told: ToldFiles) -> None:
    """Write a suite called `name` into `folder`, which is there. Raises ConfigError for a tokenizer, OSError."""
    lines = [
        "# Made by farm suites published. The limits are ExecuTorch's own (1.5.1), of TestExampleLLMScript in",
        "# backends/qualcomm/tests/test_qnn_delegate.py: rates and sizes, SQNR of the logits of its prompt against the",
        "# FP32 module, perplexity of a document by its words, accuracy of ten questions. Rates are judged on attached",
        "# devices alone.",
        "[suite]",
        f"name = {toml_value(name)}",
        'description = "Published decoders, with their weights and with ExecuTorch\'s own limits"',
        'precisions = ["16a4w"]',
    ]
    for checkpoint in checkpoints:
        tokens = [*checkpoint.beginning, *load_tokenizer(str(checkpoint.folder), folder)(PROMPT)]
        (folder / f"{checkpoint.name}.json").write_text(f"{json.dumps([tokens])}\n", encoding="utf-8")
        lines += ["", *_prompted(checkpoint), *_told(checkpoint, told)]
    (folder / "suite.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prompted(checkpoint: Checkpoint) -> Iterator[str]:
    limits, name = checkpoint.limits, checkpoint.name
    yield from _case(
        checkpoint,
        name,
        {"prompts_file": f"{name}.json", "score_file": f"{name}.json", "new": NEW_TOKENS},
    )
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
    limits, name = checkpoint.limits, f"{checkpoint.name}_told"
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
