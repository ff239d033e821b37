"""Checks of a `[case.NAME.generate]` table when its manifest is read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from farm.base.errors import UnknownNameError
from farm.base.socs import READY
from farm.suites.figures import REFERENCES
from farm.suites.generate import (
    ARCHITECTURES,
    BYTES,
    PARAM_TYPES,
    PRECISIONS_OF_TEXT,
    TOKENIZER_FILES,
    Architecture,
    Generate,
    find_architecture,
)
from farm.suites.prompts import (
    HUGGING_FACE_CONFIG,
    NAMES,
    Tokens,
    decoder_params,
    expected_of,
    generate_of,
    prefix_of,
    prompts_of,
    scored_of,
    tokenizer_file,
)
from farm.suites.suite import Case, Expectation

Problems = Iterator[tuple[str, str]]

_WEIGHTS = (".pth", ".pt", ".safetensors")
_SIZES = ("dim", "n_layers", "n_heads", "vocab_size")
FEATURES_OF_TEXT = ("shared_buffer", "use_multi_contexts", "split")
"""Compiler features for text generation. Weights common to two methods are shared and attention is split into heads by
default."""
_EXPECTED_OF_TEXT = (
    "least_decode_rate", "least_prefill_rate", "most_perplexity", "most_word_perplexity", "least_accuracy",
)  # fmt: skip
# Logits of a sample are float32 [positions, vocabulary], in a file for every output and reference.
_MOST_LOGITS_BYTES = 1 << 30
# Keys of a module's case, and their replacement.
_INSTEAD = {
    "module": "the architecture takes its place", "program": "the architecture takes its place",
    "checkpoint": "name the file as generate.weights", "args": "the architecture has params",
    "kwargs": "the architecture has params", "inputs": "prompts take their place", "samples": "each prompt is one",
    "methods": "the mode decides",
    "method": "the mode decides", "metrics": "its own figures are always measured",
    "state": "its caches are its state", "deterministic": "what repeats is seen from the tokens",
}  # fmt: skip

_BYTES = 256
_OF_TASKS = ("other_choices", "lost_answers")
# Keys for prompts that a case with `score_text` or `task` refuses; keys that `texts` refuse.
_OF_PROMPTS = ("texts", "prompts", "prompts_file", "prompt_lengths", "score_file", "expected_file", "new", "stop")
_NOT_WORDS = ("score_file", "expected_file")
_WORDS = ("score_text", "task", "texts")
_NEEDS = {"tokenizer": _WORDS, "prefix": _WORDS, "windows": ("score_text",),
          "wikitext": ("score_text",), "documents": ("task",)}  # fmt: skip


def foreign_problems(given: Collection[str]) -> Problems:
    """Yield the keys of a module beside `generate`, and their problems; `given` has the keys of the case."""
    for name, why in _INSTEAD.items():
        if name in given:
            yield name, f"is not for a case that generates text ({why}): leave it out"


def expected_problems(expected: Iterable[Expectation]) -> Problems:
    """Yield the expectations of a case without generated text that are for generated text."""
    for index, one in enumerate(expected):
        for name in _EXPECTED_OF_TEXT:
            if getattr(one, name) is not None:
                yield f"expect[{index}].{name}", "is for a case that generates text: leave it out"


def generate_problems(case: Case, inside: Path | None = None) -> Problems:
    """Yield the problems of a case of text generation, by keys of the case, so that it is compiled and run without one.

    Each check relies on the checks before it: the first problem ends the reading of the manifest.
    """
    generate = generate_of(case)
    yield from _precision_problems(case)
    for name in case.features.named:
        if name not in FEATURES_OF_TEXT:
            problem = f"is not for a case that generates text: legal are {', '.join(FEATURES_OF_TEXT)}"
            yield f"features.{name}", problem
    yield from _source_problems(case, generate)
    yield from _width_problems(generate)
    yield from _decoder_problems(case, generate)
    vocabulary = None if case.pte else int(decoder_params(case)["vocab_size"])
    yield from _likelihood_problems(case, vocabulary, inside)
    yield from _vocabulary_problems("generate.stop", (generate.stop,), vocabulary)
    # The tokenizer counts sequences and tokens of words when they are compiled.
    if not generate.scores_likelihood and not generate.texts:
        yield from _token_problems(case, generate, vocabulary)
    if case.expected and not (case.pte and generate.score_file and len(case.expected) == sample_count(case)):
        yield (
            "expected",
            "is for a pte with a score_file, logits for each prompt; tokens stand in generate.expected_file",
        )


def sample_count(case: Case) -> int:
    """Return the number of prompts of a case of text generation, 1 for given sequences."""
    generate = generate_of(case)
    return 1 if generate.scores_likelihood else len(generate.texts) or len(prompts_of(case))


def _precision_problems(case: Case) -> Problems:
    for precision in case.precisions:
        if precision in PRECISIONS_OF_TEXT or (case.pte and precision == READY):
            continue
        why = "its logits come out at -58 dB against the module's, without any error of ExecuTorch 1.5.1: "
        problem = f"{precision!r} is not for a case that generates text: {why if precision == '8a8w' else ''}"
        yield "precisions", f"{problem}legal are {', '.join(PRECISIONS_OF_TEXT)}"
    recipe = "16a4w_block"
    if recipe in case.precisions and not case.pte:
        named = generate_of(case).architecture
        if named not in ARCHITECTURES or ARCHITECTURES[named].recipe != recipe:
            able = ", ".join(one.name for one in ARCHITECTURES.values() if one.recipe == recipe)
            yield "precisions", f"{recipe!r} is ExecuTorch's own recipe for {able}: use 16a4w or 16a8w"


def _source_problems(case: Case, generate: Generate) -> Problems:
    """Yield what leaves unclear where decoder and prompts come from."""
    given = {name for name in ("params", "params_file", "weights", "hugging_face") if getattr(generate, name)}
    if case.pte and given:
        yield f"generate.{min(given)}", "is for compiled cases, and a pte is compiled already"
    if "hugging_face" in given and len(given) > 1:
        other = min(given - {"hugging_face"})
        yield f"generate.{other}", "a Hugging Face folder has it already: leave one of them out"
    if {"params", "params_file"} <= given:
        yield "generate.params", "there is a params_file as well: leave one of them out"
    if generate.weights and not generate.weights.endswith(_WEIGHTS):
        yield "generate.weights", f"{generate.weights!r} is none of {', '.join(_WEIGHTS)}"
    if generate.hugging_face:
        folder = Path(case.folder, generate.hugging_face)
        if not folder.is_dir():
            yield "generate.hugging_face", f"{folder} is no folder: download the model there first"
        if not (folder / HUGGING_FACE_CONFIG).is_file() or not any(folder.glob("*.safetensors")):
            yield "generate.hugging_face", f"{folder} has no {HUGGING_FACE_CONFIG} with *.safetensors beside it"
    prompts = [name for name in ("prompts", "prompts_file", "prompt_lengths", "texts") if getattr(generate, name)]
    if len(prompts) != 1 and not generate.scores_likelihood:
        problem = f"{prompts[0]} and {prompts[1]} are both there: leave one out" if prompts else "has nothing to ask"
        ways = "prompts, a prompts_file, prompt_lengths, texts, a score_text or a task"
        yield "generate", f"{problem}: give it {ways}"
    if case.pte and generate.prompt_lengths:
        problem = "are drawn from a vocabulary, which is unknown before a pte runs: give prompts or a prompts_file"
        yield "generate.prompt_lengths", problem
    if generate.expected_file and not case.pte:
        yield "generate.expected_file", "is for a pte: compiled cases have references instead"


def _width_problems(generate: Generate) -> Problems:
    context = generate.context
    if generate.mode != "kv" and generate.prefill > context:
        yield "generate.prefill", f"is {generate.prefill}, expected at most the context, {context}"
    if generate.mode != "lookahead":
        return
    if generate.ngram < 2:
        yield "generate.ngram", f"is {generate.ngram}, expected at least 2: a token and what follows"
    if generate.decode >= context:
        how = "the power of two from (window + gcap) * (ngram - 1), expected fewer than the context"
        yield "generate.window", f"decodes {generate.decode} positions at once, {how}, {context}"


def _decoder_problems(case: Case, generate: Generate) -> Problems:
    try:
        architecture = find_architecture(generate.architecture)
    except UnknownNameError as error:
        yield "generate.architecture", str(error)
        return
    if case.pte:
        return
    place = next((name for name in ("hugging_face", "params_file") if getattr(generate, name)), "params")
    try:
        params = decoder_params(case)
    except (OSError, ValueError) as error:
        yield f"generate.{place}", _unreadable(error)
        return
    if generate.hugging_face:
        path = Path(case.folder, generate.hugging_face, HUGGING_FACE_CONFIG)
        found = json.loads(path.read_bytes()).get("model_type")
        if not architecture.model_types:
            what = f"ExecuTorch converts no Hugging Face weights for {architecture.name}"
            yield "generate.hugging_face", f"{what}: name params_file and weights"
        elif found not in architecture.model_types:
            known = " or ".join(architecture.model_types)
            yield (
                "generate.hugging_face",
                f"is of model_type {found!r}, {architecture.name} is {known}: name its architecture",
            )
    for name, problem in _param_problems(params, architecture):
        yield f"generate.{place}{name and f'.{name}'}", problem


def _param_problems(params: Mapping[str, Any], architecture: Architecture) -> Problems:
    """Yield names of parameters, "" for all of them, and their problems."""
    for name, value in params.items():
        if name not in PARAM_TYPES:
            yield "", str(UnknownNameError("parameter", name, PARAM_TYPES))
        elif not _is_of(value, PARAM_TYPES[name]):
            yield name, f"is {value!r}, expected {PARAM_TYPES[name].__name__}"
    if missing := [name for name in _SIZES if name not in params]:
        hint = "or name a published architecture: docs/guides/language_models.md lists them"
        yield "", f"{missing[0]} is missing: give {', '.join(_SIZES)}, {hint}"
    for name, value in params.items():
        if PARAM_TYPES[name] is int and not name.endswith("_idx") and value < 1:
            yield name, f"is {value}, expected at least 1"
    heads, kv_heads = params["n_heads"], params.get("n_kv_heads", params["n_heads"])
    if heads % kv_heads:
        yield "n_kv_heads", f"is {kv_heads}, expected a divisor of n_heads, {heads}"
    if "head_dim" not in params and params["dim"] % heads:
        yield "n_heads", f"is {heads}, expected a divisor of dim, {params['dim']}"
    head = params.get("head_dim", params["dim"] // heads)
    if head % 2 or (architecture.hadamard and head & (head - 1)):
        wanted = "a power of two, for its Hadamard matrix" if architecture.hadamard else "an even number"
        yield "head_dim", f"is {head}, expected {wanted}"
    layer_types = params.get("layer_types")
    if architecture.window_mask and (layer_types is None or len(layer_types) != params["n_layers"]):
        yield "layer_types", "expected sliding_attention or full_attention for every layer"


def _is_of(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _token_problems(case: Case, generate: Generate, vocabulary: int | None) -> Problems:
    files: dict[str, Tokens] = {}
    for name, read in (("prompts_file", prompts_of), ("score_file", scored_of), ("expected_file", expected_of)):
        try:
            files[name] = read(case)
        except (OSError, ValueError) as error:
            yield f"generate.{name}", _unreadable(error)
            return
    prompts, scored, expected = files.values()
    if not prompts:
        yield "generate.prompts_file", "has no prompt"
    asked = next(name for name in ("prompts_file", "prompt_lengths", "prompts") if getattr(generate, name))
    for name, rows in ((asked, prompts), ("score_file", scored), ("expected_file", expected)):
        yield from _vocabulary_problems(f"generate.{name}", rows, vocabulary)
        if rows and len(rows) != len(prompts):
            yield f"generate.{name}", f"has {len(rows)} lines, expected one a prompt, {len(prompts)}"
    for row, prompt in enumerate(prompts):
        if problem := _no_room(generate, len(prompt)):
            yield f"generate.{asked}", f"prompt {row} {problem}"
    for row, tokens in enumerate(scored):
        if not 1 <= len(tokens) <= generate.context:
            problem = f"line {row} has {len(tokens)} tokens, expected 1 to the context, {generate.context}"
            yield "generate.score_file", problem
    longest = max(map(len, scored or [(0,) * min(len(one) + generate.new, generate.context) for one in prompts]))
    if vocabulary is not None and (nbytes := 4 * longest * vocabulary) > _MOST_LOGITS_BYTES:
        problem = f"logits of {longest} positions are {nbytes >> 20} MiB a prompt: score fewer than"
        fewer = _MOST_LOGITS_BYTES // (4 * vocabulary)
        yield "generate.new", f"{problem} {fewer}, with a smaller new or a score_file"


def _vocabulary_problems(key: str, rows: Tokens, vocabulary: int | None) -> Problems:
    for row, token in ((row, token) for row, tokens in enumerate(rows) for token in tokens):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            known = f"and below the vocabulary, {vocabulary}" if vocabulary is not None else "0"
            where = "" if key.endswith(".stop") else f" in line {row}"
            yield key, f"has the token {token}{where}, expected at least 0 {known}"


def _no_room(generate: Generate, length: int) -> str:
    """Return why a prompt of `length` tokens cannot be taken; "" where it can."""
    context, prefill = generate.context, generate.prefill
    if not length:
        return "is empty: give at least one token, such as the begin-of-sequence token"
    if length > context:
        return f"has {length} tokens, expected at most the context, {context}"
    # A chunk is as wide as the method: its last one needs the whole width.
    if generate.mode != "kv" and (chunks := -(-length // prefill)) * prefill > context:
        more = f"{chunks} chunks of prefill = {prefill}"
        return f"has {length} tokens, {more}, which are more than the context, {context}"
    if generate.mode == "lookahead" and length + generate.decode > context:
        return f"has {length} tokens, and lookahead decodes {generate.decode} more at once: the context is {context}"
    return ""


def _likelihood_problems(case: Case, vocabulary: int | None, inside: Path | None = None) -> Problems:
    """Yield the problems of a text or task that cannot be scored, by keys of the case; the first one counts.

    `vocabulary` is None for a `.pte`; `inside` is the folder of all files of a task. Raises ConfigError for a task that
    cannot be read.
    """
    generate = generate_of(case)
    given = {name for name in Generate.__struct_fields__ if getattr(generate, name) != getattr(Generate(), name)}
    for name, needed in _NEEDS.items():
        if name in given and not given.intersection(needed):
            yield f"generate.{name}", f"is for {' or '.join(needed)}, which is missing"
    yield from _foreign_limits(case, generate)
    if generate.scores_likelihood:
        odd = [name for name in _OF_PROMPTS if name in given]
        problem = "is for prompts: a scored text has none, and one token is generated after each sequence"
    elif generate.texts:
        odd = [name for name in _NOT_WORDS if name in given] + (["texts"] if case.pte else [])
        problem = "is not for texts, whose own logits are judged, of a program that is compiled"
    else:
        return
    if odd:
        yield f"generate.{odd[0]}", problem
    yield from _tokenizer_problems(case, generate, vocabulary)
    if generate.task:
        from farm.suites.tasks import read_task

        read_task(Path(case.folder, generate.task), inside)


def _tokenizer_problems(case: Case, generate: Generate, vocabulary: int | None) -> Problems:
    if not generate.tokenizer:
        problem = f"is missing: name {' or '.join(NAMES)} of the model, a folder with one, or {BYTES!r}"
        yield "generate.tokenizer", problem
    if generate.tokenizer == BYTES:
        if vocabulary is not None and vocabulary < _BYTES:
            yield "generate.tokenizer", f"has {_BYTES} tokens, and the decoder {vocabulary}"
    elif tokenizer_file(Path(case.folder, generate.tokenizer)) is None:
        kinds = " or ".join(f"*{kind}" for kind in TOKENIZER_FILES)
        problem = f"{generate.tokenizer} is neither {kinds} nor a folder with {' or '.join(NAMES)}"
        yield "generate.tokenizer", problem
    if generate.prefix == "config" and not generate.hugging_face:
        yield "generate.prefix", "is in config.json of hugging_face, which is missing"
    for token in prefix_of(case):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            yield "generate.prefix", f"has the token {token}, which the decoder has not"


def _foreign_limits(case: Case, generate: Generate) -> Problems:
    """Yield limits of figures that `case` lacks: such a limit would never decide, or never be met."""
    by_words = any(one.most_word_perplexity is not None for one in case.expect)
    if by_words and (generate.windows is not None or not generate.score_text):
        yield "expect.most_word_perplexity", "is of the words of a whole score_text: give it one, without windows"
    without = () if generate.task else _OF_TASKS
    if generate.scores_likelihood:
        without = (*without, "kl", "margin", "prefill_db", *(() if generate.score_text else ("perplexity_ratio",)))
    for (precision, tolerance), kind in itertools.product(case.tolerances.items(), REFERENCES):
        if odd := [name for name in without if getattr(getattr(tolerance, kind), name) is not None]:
            yield f"tolerance.{precision}.{kind}.{odd[0]}", "is a figure that this case has not: leave it out"


def _unreadable(error: OSError | ValueError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
