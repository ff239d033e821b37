"""Use of ExecuTorch's Qualcomm examples for one decoder: configuration, recipe, arguments and weights."""

from __future__ import annotations

import argparse
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
from executorch.backends.qualcomm.quantizer.quant_recipe import QuantGranularity, QuantRecipe
from executorch.backends.qualcomm.quantizer.quantizer import QuantDtype
from torchao.quantization.pt2e import MinMaxObserver

from farm.base.errors import ConfigError, FarmError, MissingToolError
from farm.builds.compile.flows.factory import load_tensors
from farm.builds.compile.llm.stand_ins import stand_ins
from farm.suites.generate import Architecture, Generate
from farm.suites.prompts import generate_of
from farm.suites.suite import Case

# Use of ExecuTorch's Qualcomm examples for one decoder: configuration, recipe and arguments.


try:
    with stand_ins():
        from executorch.examples.qualcomm.oss_scripts import llama
        from executorch.examples.qualcomm.oss_scripts.llama import decoder_constants as constants
        from executorch.examples.qualcomm.oss_scripts.llama import static_llm_quant_recipe as recipes
        from executorch.examples.qualcomm.oss_scripts.llama.dataset import collators
        from executorch.examples.qualcomm.oss_scripts.llama.wrappers import base_component as components
        from executorch.examples.qualcomm.oss_scripts.llama.wrappers import llm_wrappers as wrappers
except ImportError as error:
    raise MissingToolError(
        f"the ExecuTorch of this toolchain has no decoders of its Qualcomm examples that can be imported ({error}): "
        "cases that generate text need ExecuTorch 1.5 or later"
    ) from error


__all__ = ["arguments", "collators", "components", "configuration", "constants", "llama", "wrappers"]


class PlainQuantRecipe(recipes.StaticLLMQuantRecipe):  # type: ignore[misc]
    """Recipe of 16a8w: weights in 8 bits with a scale per channel, all other tensors, caches included, in 16 bits."""

    default_quant_dtype = QuantDtype.use_16a8w

    def __init__(self, verbose: bool = False) -> None:
        super().__init__()
        rules = {"act_observer": MinMaxObserver, "is_qat": False}
        self.recipe = QuantRecipe(
            self.default_quant_dtype, granularity=QuantGranularity.PER_TENSOR, verbose=verbose, **rules
        ).add_node_target(
            {torch.ops.aten.conv2d.default}, QuantDtype.use_16a8w, granularity=QuantGranularity.PER_CHANNEL, **rules
        )


# Recipes that suit every decoder; 16a4w is ExecuTorch's recipe for its smallest decoder, with a cache of 8 bits.
_GENERAL = {"16a8w": PlainQuantRecipe, "16a4w": recipes.LlamaStories260KQuantRecipe}


# Decoders whose Hugging Face weights ExecuTorch converts only with torchtune, or not at all. Their tensors have the
# names of Qwen 3, which shares the embedding if there is no output as well. Queries and keys keep Hugging Face's order,
# into which ExecuTorch brings other weights.
_NAMED_AS_QWEN3 = ("llama3_2-1b_instruct", "llama3_2-3b_instruct", "smollm2_135m")


def configuration(architecture: Architecture, precision: str, shards: int, *, hugging_face: bool) -> Any:
    """Return ExecuTorch's configuration of a decoder at `precision`, in `shards` contexts.

    `hugging_face` is True for weights of a Hugging Face folder. Raises MissingToolError if this ExecuTorch has no such
    decoder.
    """
    known = llama.SUPPORTED_LLM_MODELS.get(architecture.upstream)
    if known is None:
        problem = f"the ExecuTorch of this toolchain has no decoder {architecture.upstream}"
        raise MissingToolError(f"{problem}: name another architecture, or use a later one")
    changed: dict[str, Any] = {"num_sharding": shards}
    if precision != architecture.recipe:
        # The search for scales (seq_mse) of a decoder's own recipe would take minutes and is made for its own sizes.
        changed |= {"quant_recipe": _GENERAL[precision], "seq_mse_candidates": 0}
    if hugging_face and architecture.upstream in _NAMED_AS_QWEN3:
        changed |= {"transform_weight": False, "convert_weights": llama.convert_qwen3_weights}
    found = type(known)
    return type(found.__name__, (found,), changed)()


def arguments(generate: Generate, architecture: Architecture, params: Path) -> Any:
    """Return arguments as ExecuTorch's `llama.py` parses them, with its defaults where `generate` sets no value.

    `params` is a `params.json`; ExecuTorch writes its files into the same folder.
    """
    return argparse.Namespace(
        decoder_model=architecture.upstream,
        model_mode=generate.mode,
        params=str(params),
        checkpoint=None,
        artifact=str(params.parent),
        max_seq_len=generate.context,
        max_context_len=generate.context,
        prefill_ar_len=generate.prefill,
        window=generate.window,
        ngram=generate.ngram,
        gcap=generate.gcap,
        dtype_override="fp32",
        batch_size=1,
        embedding_quantize=None,
        use_attention_sink=None,
        qat=False,
        quant_recipe_suggestion=False,
        verbose=False,
        use_fp16=False,
        online_prepare=False,
        eval_tasks=None,
        eval_num_fewshot=None,
        eval_limit=1,
    )


# Weights of a decoder for ExecuTorch's examples: drawn, from a checkpoint, or from a Hugging Face folder.


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
    return case.error(f"generate.{key}", f"{name} {problem}")
