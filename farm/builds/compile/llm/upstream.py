"""Use of ExecuTorch's Qualcomm examples for one decoder: configuration, recipe and arguments."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from executorch.backends.qualcomm.quantizer.quant_recipe import QuantGranularity, QuantRecipe
from executorch.backends.qualcomm.quantizer.quantizer import QuantDtype
from torchao.quantization.pt2e import MinMaxObserver

from farm.base.errors import MissingToolError
from farm.builds.compile.llm.stand_ins import stand_ins

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

from pathlib import Path

from farm.suites.architectures import Architecture
from farm.suites.generate import Generate

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
