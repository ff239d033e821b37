"""Weights of a decoder for ExecuTorch's examples: drawn, from a checkpoint, or from a Hugging Face folder."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from farm.base.errors import ConfigError, FarmError
from farm.builds.compile.flows.factory import load_tensors
from farm.builds.compile.llm.upstream import components, llama, wrappers
from farm.suites.prompts import generate_of
from farm.suites.suite import Case

_FILE = "checkpoint.pth"
_SAFETENSORS = "*.safetensors"
_OF_WEIGHTS = (_SAFETENSORS, f"{_SAFETENSORS}.index.json")


def make_checkpoint(case: Case, config: Any, arguments: Any, folder: Path) -> Path:
    """Return the checkpoint of the decoder of `case` with the names of the static decoder; new files are in `folder`.

    A Hugging Face folder is converted as ExecuTorch's examples convert a downloaded one. Raises ConfigError for an
    unreadable file of the user.
    """
    generate, root = generate_of(case), Path(case.folder)
    if generate.hugging_face:
        source = root / generate.hugging_face
        return _of_user(case, "hugging_face", lambda: _converted(source, config, arguments.decoder_model, folder))
    if generate.weights:
        return _of_user(case, "weights", lambda: _readable(root / generate.weights, folder))
    return _drawn(case.seed, config, arguments, folder)


@contextmanager
def checkpoint_in_use(case: Case, arguments: Any, checkpoint: Path) -> Iterator[None]:
    """Let decoders that are created in the body load the weights in `checkpoint`.

    Raises ConfigError if weights of the user do not fit the decoder.
    """
    generate = generate_of(case)
    if not generate.hugging_face:
        arguments.checkpoint = str(checkpoint)
    if not generate.hugging_face and not generate.weights:
        yield
        return
    # ExecuTorch adapts the weights of some decoders after download and conversion; the checkpoint replaces these two.
    with patch.object(wrappers, "download_and_convert_hf_checkpoint", lambda *_: str(checkpoint)):
        try:
            yield
        except (RuntimeError, KeyError, AttributeError, TypeError) as error:
            key = "hugging_face" if generate.hugging_face else "weights"
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise _refusal(case, key, f"does not fit the decoder: {problem}") from error


def _drawn(seed: int, config: Any, arguments: Any, folder: Path) -> Path:
    known = llama.LLM_VARIANT_ARCHS.get(arguments.decoder_model, wrappers.LlamaModel)
    given = wrappers.ModelArgs(**json.loads(Path(arguments.params).read_bytes()))
    recipe = config.quant_recipe(False)
    model_args = components.process_model_args(arguments, given, recipe, config, components.Mode.DECODE)
    torch.manual_seed(seed)
    path = folder / _FILE
    torch.save(known(model_args, ar_len=model_args.ar_len).state_dict(), path)
    return path


def _readable(path: Path, folder: Path) -> Path:
    """Return `path` if ExecuTorch can read it, else a readable copy. Raises torch's exceptions for a broken file."""
    state = load_tensors(path)
    if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
        return path
    torch.save(state, folder / _FILE)
    return folder / _FILE


def _converted(source: Path, config: Any, decoder: str, folder: Path) -> Path:
    """Return the weights in the Hugging Face folder `source`, with the names of the static decoder."""
    # The folder contains safetensors alone: ExecuTorch prefers a pickle beside them, which is in no key of a bundle.
    alone = folder / "hugging_face"
    alone.mkdir()
    for file in (file for pattern in _OF_WEIGHTS for file in source.glob(pattern)):
        (alone / file.name).symlink_to(file.absolute())
    if decoder == "phi_4_mini":
        # ExecuTorch reads safetensors of this decoder with torchtune, but a pickle of tensors without it.
        files = map(load_tensors, sorted(alone.glob(_SAFETENSORS)))
        torch.save({name: tensor for file in files for name, tensor in file.items()}, alone / "pytorch_model.bin")
    config.convert_weights.__func__(str(alone), str(folder / _FILE))
    shutil.rmtree(alone)
    return folder / _FILE


def _of_user(case: Case, key: str, read: Callable[[], Path]) -> Path:
    try:
        return read()
    except FarmError:
        raise
    except pickle.UnpicklingError as error:
        problem = "is no file of tensors alone, and what else is in it could run code: save the state_dict of the model"
        raise _refusal(case, key, problem) from error
    except Exception as error:  # torch, safetensors and ExecuTorch may raise any exception for a broken file
        raise _refusal(case, key, f"cannot be read: {error}") from error


def _refusal(case: Case, key: str, problem: str) -> ConfigError:
    name = getattr(generate_of(case), key)
    return ConfigError(case.manifest, f"case.{case.name}.generate.{key}", f"{name} {problem}")
