"""Text -> token ids, by the tokenizer of a model in a local file, or as the bytes of the text. Torch-free.

The libraries are ExecuTorch's own (`tokenizers`, `sentencepiece`, `tiktoken`), and are imported where a file wants one.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farm.base.errors import ConfigError, MissingToolError
from farm.suites.generate import BYTES

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
