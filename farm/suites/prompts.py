"""The token ids of a case that generates text: written in its manifest, read from a file, or drawn. Torch-free."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.suites.generate import complete_params, find_architecture, params_of_hugging_face

if TYPE_CHECKING:
    from farm.suites.generate import Generate
    from farm.suites.suite import Case

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
