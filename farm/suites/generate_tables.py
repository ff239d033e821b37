"""Checks of a `[case.NAME.generate]` table when its manifest is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from farm.base.errors import ConfigError, UnknownNameError
from farm.base.socs import READY
from farm.suites.accuracy.likelihood_tables import check_scored
from farm.suites.architectures import ARCHITECTURES, PARAM_TYPES, Architecture, find_architecture
from farm.suites.generate import PRECISIONS_OF_TEXT
from farm.suites.prompts import (
    HUGGING_FACE_CONFIG,
    Tokens,
    decoder_params,
    expected_of,
    generate_of,
    prompts_of,
    scored_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from farm.suites.suite import Case, Expectation

_T = TypeVar("_T")

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


def check_alone(manifest: Path, key: str, given: Collection[str]) -> None:
    """Raise ConfigError for keys of a module beside `generate`; `given` has the keys of the case."""
    for name, why in _INSTEAD.items():
        if name in given:
            raise ConfigError(manifest, f"{key}.{name}", f"is not for a case that generates text ({why}): leave it out")


def check_expected(manifest: Path, key: str, expected: Iterable[Expectation]) -> None:
    """Raise ConfigError where a case that generates nothing is expected to do so at a rate."""
    for index, one in enumerate(expected):
        for name in _EXPECTED_OF_TEXT:
            if getattr(one, name) is not None:
                raise ConfigError(manifest, f"{key}[{index}].{name}", "is for a case that generates text: leave it out")


def checked(manifest: Path, key: str, case: Case, inside: Path | None = None) -> int:
    """Return the number of prompts of a case of text generation, 1 for given sequences; check that its files exist.

    Raises ConfigError with the key for anything that cannot be compiled or run.
    """
    _check_precisions(manifest, f"{key}.precisions", case)
    for name in case.features.named:
        if name not in FEATURES_OF_TEXT:
            problem = f"is not for a case that generates text: legal are {', '.join(FEATURES_OF_TEXT)}"
            raise ConfigError(manifest, f"{key}.features.{name}", problem)
    key = f"{key}.generate"
    _check_sources(manifest, key, case)
    _check_widths(manifest, key, case)
    vocabulary = _check_decoder(manifest, key, case)
    check_scored(manifest, key, case, vocabulary, inside)
    generate = generate_of(case)
    _check_vocabulary(manifest, f"{key}.stop", (generate.stop,), vocabulary)
    # The tokenizer counts sequences and tokens of words when they are compiled.
    prompts = 1 if generate.scores_likelihood else len(generate.texts) or _check_tokens(manifest, key, case, vocabulary)
    if case.expected and not (case.pte and generate.score_file and len(case.expected) == prompts):
        problem = "is for a pte with a score_file, logits for each prompt; tokens stand in generate.expected_file"
        raise ConfigError(manifest, f"case.{case.name}.expected", problem)
    return prompts


def _check_precisions(manifest: Path, key: str, case: Case) -> None:
    for precision in case.precisions:
        if precision in PRECISIONS_OF_TEXT or (case.pte and precision == READY):
            continue
        why = "its logits come out at -58 dB against the module's, without any error of ExecuTorch 1.5.1: "
        problem = f"{precision!r} is not for a case that generates text: {why if precision == '8a8w' else ''}"
        raise ConfigError(manifest, key, f"{problem}legal are {', '.join(PRECISIONS_OF_TEXT)}")
    recipe = "16a4w_block"
    if recipe in case.precisions and not case.pte:
        named = generate_of(case).architecture
        if named not in ARCHITECTURES or ARCHITECTURES[named].recipe != recipe:
            able = ", ".join(one.name for one in ARCHITECTURES.values() if one.recipe == recipe)
            raise ConfigError(manifest, key, f"{recipe!r} is ExecuTorch's own recipe for {able}: use 16a4w or 16a8w")


def _check_sources(manifest: Path, key: str, case: Case) -> None:
    """Raise ConfigError unless it is clear where decoder and prompts come from."""
    generate = generate_of(case)
    given = {name for name in ("params", "params_file", "weights", "hugging_face") if getattr(generate, name)}
    if case.pte and given:
        raise ConfigError(manifest, f"{key}.{min(given)}", "is for what is compiled: a pte is that already")
    if "hugging_face" in given and len(given) > 1:
        other = min(given - {"hugging_face"})
        raise ConfigError(manifest, f"{key}.{other}", "a Hugging Face folder has it already: leave one of them out")
    if {"params", "params_file"} <= given:
        raise ConfigError(manifest, f"{key}.params", "there is a params_file as well: leave one of them out")
    if generate.weights and not generate.weights.endswith(_WEIGHTS):
        raise ConfigError(manifest, f"{key}.weights", f"{generate.weights!r} is none of {', '.join(_WEIGHTS)}")
    if generate.hugging_face:
        _check_hugging_face(manifest, f"{key}.hugging_face", case)
    prompts = [name for name in ("prompts", "prompts_file", "prompt_lengths", "texts") if getattr(generate, name)]
    if len(prompts) != 1 and not generate.scores_likelihood:
        problem = f"{prompts[0]} and {prompts[1]} are both there: leave one out" if prompts else "has nothing to ask"
        ways = "prompts, a prompts_file, prompt_lengths, texts, a score_text or a task"
        raise ConfigError(manifest, key, f"{problem}: give it {ways}")
    if case.pte and generate.prompt_lengths:
        problem = "are drawn from a vocabulary, which a pte does not say before it runs: give prompts or a prompts_file"
        raise ConfigError(manifest, f"{key}.prompt_lengths", problem)
    if generate.expected_file and not case.pte:
        problem = "is for a pte: the references of what is compiled say what is right"
        raise ConfigError(manifest, f"{key}.expected_file", problem)


def _check_hugging_face(manifest: Path, key: str, case: Case) -> None:
    folder = Path(case.folder, generate_of(case).hugging_face)
    if not folder.is_dir():
        raise ConfigError(manifest, key, f"{folder} is no folder: download the model there first")
    if not (folder / HUGGING_FACE_CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(manifest, key, f"{folder} has no {HUGGING_FACE_CONFIG} with *.safetensors beside it")


def _check_widths(manifest: Path, key: str, case: Case) -> None:
    generate = generate_of(case)
    if generate.mode != "kv" and generate.prefill > generate.context:
        problem = f"is {generate.prefill}, expected at most the context, {generate.context}"
        raise ConfigError(manifest, f"{key}.prefill", problem)
    if generate.mode == "lookahead":
        if generate.ngram < 2:
            raise ConfigError(
                manifest, f"{key}.ngram", f"is {generate.ngram}, expected at least 2: a token and what follows"
            )
        if generate.decode >= generate.context:
            problem = (
                f"decodes {generate.decode} positions at once, the power of two from (window + gcap) * (ngram - 1), "
                f"expected fewer than the context, {generate.context}"
            )
            raise ConfigError(manifest, f"{key}.window", problem)


def _check_decoder(manifest: Path, key: str, case: Case) -> int | None:
    """Return how many tokens the decoder knows; None for a `.pte`."""
    generate = generate_of(case)
    try:
        architecture = find_architecture(generate.architecture)
    except UnknownNameError as error:
        raise ConfigError(manifest, f"{key}.architecture", str(error)) from None
    if case.pte:
        return None
    place = (
        f"{key}.params" if generate.params else f"{key}.{'hugging_face' if generate.hugging_face else 'params_file'}"
    )
    params = _read(manifest, place, lambda: decoder_params(case))
    if generate.hugging_face:
        _check_model_type(manifest, f"{key}.hugging_face", case, architecture)
    _check_params(manifest, place if generate.files or generate.params else f"{key}.params", params, architecture)
    return int(params["vocab_size"])


def _check_model_type(manifest: Path, key: str, case: Case, architecture: Architecture) -> None:
    import json

    path = Path(case.folder, generate_of(case).hugging_face, HUGGING_FACE_CONFIG)
    found = json.loads(path.read_bytes()).get("model_type")
    if not architecture.model_types:
        problem = f"ExecuTorch converts no Hugging Face weights for {architecture.name}: name params_file and weights"
        raise ConfigError(manifest, key, problem)
    if found not in architecture.model_types:
        problem = f"is of model_type {found!r}, {architecture.name} is {' or '.join(architecture.model_types)}"
        raise ConfigError(manifest, key, f"{problem}: name its architecture")


def _check_params(manifest: Path, key: str, params: Mapping[str, Any], architecture: Architecture) -> None:
    for name, value in params.items():
        if name not in PARAM_TYPES:
            raise ConfigError(manifest, key, str(UnknownNameError("parameter", name, PARAM_TYPES)))
        if not _is_of(value, PARAM_TYPES[name]):
            raise ConfigError(manifest, f"{key}.{name}", f"is {value!r}, expected {PARAM_TYPES[name].__name__}")
    if missing := [name for name in _SIZES if name not in params]:
        hint = "or name a published architecture: docs/guides/language_models.md lists them"
        raise ConfigError(manifest, key, f"{missing[0]} is missing: give {', '.join(_SIZES)}, {hint}")
    whole = {name: value for name, value in params.items() if PARAM_TYPES[name] is int and not name.endswith("_idx")}
    if below := [name for name, value in whole.items() if value < 1]:
        raise ConfigError(manifest, f"{key}.{below[0]}", f"is {params[below[0]]}, expected at least 1")
    heads, kv_heads = params["n_heads"], params.get("n_kv_heads", params["n_heads"])
    if heads % kv_heads:
        raise ConfigError(manifest, f"{key}.n_kv_heads", f"is {kv_heads}, expected a divisor of n_heads, {heads}")
    if "head_dim" not in params and params["dim"] % heads:
        raise ConfigError(manifest, f"{key}.n_heads", f"is {heads}, expected a divisor of dim, {params['dim']}")
    head = params.get("head_dim", params["dim"] // heads)
    if head % 2 or (architecture.hadamard and head & (head - 1)):
        wanted = "a power of two, for its Hadamard matrix" if architecture.hadamard else "an even number"
        raise ConfigError(manifest, f"{key}.head_dim", f"is {head}, expected {wanted}")
    layer_types = params.get("layer_types")
    if architecture.window_mask and (layer_types is None or len(layer_types) != params["n_layers"]):
        problem = "expected sliding_attention or full_attention for every layer"
        raise ConfigError(manifest, f"{key}.layer_types", problem)


def _is_of(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_tokens(manifest: Path, key: str, case: Case, vocabulary: int | None) -> int:
    generate = generate_of(case)
    prompts = _read(manifest, f"{key}.prompts_file", lambda: prompts_of(case))
    scored = _read(manifest, f"{key}.score_file", lambda: scored_of(case))
    expected = _read(manifest, f"{key}.expected_file", lambda: expected_of(case))
    if not prompts:
        raise ConfigError(manifest, f"{key}.prompts_file", "has no prompt")
    places: list[tuple[str, Tokens]] = [
        ("prompts_file" if generate.prompts_file else "prompts", prompts), ("score_file", scored),
        ("expected_file", expected),
    ]  # fmt: skip
    for name, rows in places:
        _check_vocabulary(manifest, f"{key}.{name}", rows, vocabulary)
    for name, rows in (("score_file", scored), ("expected_file", expected)):
        if rows and len(rows) != len(prompts):
            raise ConfigError(
                manifest, f"{key}.{name}", f"has {len(rows)} lines, expected one a prompt, {len(prompts)}"
            )
    name = "prompt_lengths" if generate.prompt_lengths else places[0][0]
    for row, prompt in enumerate(prompts):
        if problem := _no_room(case, len(prompt)):
            raise ConfigError(manifest, f"{key}.{name}", f"prompt {row} {problem}")
    for row, tokens in enumerate(scored):
        if not 1 <= len(tokens) <= generate.context:
            problem = f"line {row} has {len(tokens)} tokens, expected 1 to the context, {generate.context}"
            raise ConfigError(manifest, f"{key}.score_file", problem)
    longest = max(map(len, scored or [(0,) * min(len(one) + generate.new, generate.context) for one in prompts]))
    if vocabulary is not None and (nbytes := 4 * longest * vocabulary) > _MOST_LOGITS_BYTES:
        problem = f"logits of {longest} positions are {nbytes >> 20} MiB a prompt: score fewer than"
        fewer = _MOST_LOGITS_BYTES // (4 * vocabulary)
        raise ConfigError(manifest, f"{key}.new", f"{problem} {fewer}, with a smaller new or a score_file")
    return len(prompts)


def _check_vocabulary(manifest: Path, key: str, rows: Tokens, vocabulary: int | None) -> None:
    for row, token in ((row, token) for row, tokens in enumerate(rows) for token in tokens):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            known = f"and below the vocabulary, {vocabulary}" if vocabulary is not None else "0"
            where = "" if key.endswith(".stop") else f" in line {row}"
            raise ConfigError(manifest, key, f"has the token {token}{where}, expected at least 0 {known}")


def _no_room(case: Case, length: int) -> str:
    """Return why a prompt of `length` tokens cannot be taken; "" where it can."""
    generate = generate_of(case)
    context, prefill = generate.context, generate.prefill
    if not length:
        return "is empty: give it a token at least, such as that of the beginning"
    if length > context:
        return f"has {length} tokens, expected at most the context, {context}"
    # A chunk is as wide as the method: its last one needs the whole width.
    if generate.mode != "kv" and (chunks := -(-length // prefill)) * prefill > context:
        return (
            f"has {length} tokens, {chunks} chunks of prefill = {prefill}, which are more than the context, {context}"
        )
    if generate.mode == "lookahead" and length + generate.decode > context:
        return f"has {length} tokens, and lookahead decodes {generate.decode} more at once: the context is {context}"
    return ""


def _read(manifest: Path, key: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except OSError as error:
        raise ConfigError(manifest, key, f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(manifest, key, str(error)) from None
