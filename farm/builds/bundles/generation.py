"""Static decoders in a `.pte`, as ExecuTorch's Qualcomm examples export them: facts and inputs by their file. No torch.

Inputs are tokens, a mask and positions, and a cache for each head's keys and values; outputs are logits and new columns
of the caches. Constant methods return the other facts (ExecuTorch 1.5, examples/qualcomm/oss_scripts/llama).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import INPUTS, Generation, TensorSpec
from farm.builds.program.pte import Method, Program
from farm.suites.generate import DECODE, PREFILL

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tokens = Sequence[Sequence[int]]

NO_TOKEN = -1
"""Filler after the end of token sequences that are shorter than the longest."""

_TOKENS = ("int32", "int64")
_LOGITS_RANK = 3
# Tokens, mask and position; sliding windows add a mask.
_BESIDE_CACHES = 3


def generation_of(
    program: Program, *, prompts: Tokens, scored: Tokens = (), new: int, stop: Sequence[int] = ()
) -> Generation:
    """Return the facts of a bundle with `program`, which generates `new` tokens after each prompt of `prompts`.

    `scored` are the sequences with judged logits, one for each prompt, or empty. Raises ConfigError with the file for a
    program that generates no text and for tokens outside of its vocabulary or context.
    """
    by_name = {method.name: method for method in program.methods}
    decode = by_name.get(DECODE)
    if decode is None:
        problem = f"generates no text: it has no method {DECODE!r}, as static decoders of ExecuTorch's examples have"
        raise ConfigError(program.path, "", problem)
    prefill = by_name.get(PREFILL)
    for method in filter(None, (decode, prefill)):
        _require_decoder(program, method)
    numbers = {name: method.outputs[0].number for name, method in by_name.items() if _is_constant(method)}
    context = _whole(numbers, "get_max_context_len", decode.inputs[1].shape[-1])
    width = decode.inputs[0].shape[-1]
    generation = Generation(
        mode="hybrid" if prefill else "kv",
        context=context,
        prefill=prefill.inputs[0].shape[-1] if prefill else 0,
        decode=width,
        layers=_whole(numbers, "get_n_layers", max(1, (len(decode.inputs) - _BESIDE_CACHES) // 2)),
        vocabulary=decode.outputs[0].shape[-1],
        cache_bits=_whole(numbers, "get_kv_io_bit_width", np.dtype(decode.inputs[-1].dtype).itemsize * 8),
        new=new,
        stop=tuple(stop),
        prompt_tokens=tuple(map(len, prompts)),
        scored=tuple(map(len, scored)),
    )
    if width > 1:
        generation = msgspec.structs.replace(generation, mode="lookahead")
    _require_tokens(program, generation, prompts, scored)
    return generation


def write_tokens(folder: Path, prompts: Tokens) -> tuple[TensorSpec]:
    """Write the prompts of a bundle that generates text into its `folder`, and return the spec of its input."""
    (folder / INPUTS).mkdir()
    array = padded(prompts)
    for sample, row in enumerate(array):
        (folder / INPUTS / f"input_{sample}_0.raw").write_bytes(row.tobytes())
    return (TensorSpec(array.shape[1:], array.dtype.name),)


def padded(rows: Tokens) -> NDArray[np.int32]:
    """Return token ids as an array, a row for each sequence, with NO_TOKEN after its end."""
    array = np.full((len(rows), max(map(len, rows))), NO_TOKEN, np.int32)
    for row, tokens in zip(array, rows, strict=True):
        row[: len(tokens)] = tokens
    return array


def _is_constant(method: Method) -> bool:
    return not method.inputs and len(method.outputs) == 1 and method.outputs[0].number is not None


def _whole(numbers: dict[str, float | None], name: str, otherwise: int) -> int:
    number = numbers.get(name)
    return otherwise if number is None else int(number)


def _require_decoder(program: Program, method: Method) -> None:
    tokens, logits = (method.inputs[0] if method.inputs else None), (method.outputs[0] if method.outputs else None)
    if tokens is None or len(method.inputs) < 2 or tokens.dtype not in _TOKENS or not tokens.shape:
        problem = f"{method.name} takes {tokens or 'nothing'} first, expected token ids, int32[1, N], and a mask"
    elif logits is None or len(logits.shape) != _LOGITS_RANK:
        problem = f"{method.name} gives {logits or 'nothing'} first, expected logits, [1, N, vocabulary]"
    else:
        return
    raise ConfigError(program.path, "", f"is no static decoder: {problem}")


def _require_tokens(program: Program, generation: Generation, prompts: Tokens, scored: Tokens) -> None:
    known = f"the vocabulary has 0 to {generation.vocabulary - 1}"
    for what, rows in (("prompt", prompts), ("sequence to score", scored)):
        for number, row in enumerate(rows):
            if not 1 <= len(row) <= generation.context:
                problem = f"{what} {number} has {len(row)} tokens, and the context takes 1 to {generation.context}"
                raise ConfigError(program.path, "", problem)
            if beyond := [token for token in row if not 0 <= token < generation.vocabulary]:
                raise ConfigError(program.path, "", f"{what} {number} has the token {beyond[0]}, and {known}")
    if foreign := [token for token in generation.stop if not 0 <= token < generation.vocabulary]:
        raise ConfigError(program.path, "", f"the stop token {foreign[0]} is none: {known}")
