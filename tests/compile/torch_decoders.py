"""Decoders of the weights that users have, compared with the model that the weights are of.

Hugging Face folders are written by transformers, which is the model as well; a checkpoint is of the decoder itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from farm.base.errors import ConfigError
from farm.builds.compile.llm.compiler import ReferenceDecoder, log_probabilities, make_decoder
from farm.suites.manifests import load_suite
from farm.suites.suite import Job, Target

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# Class in transformers by architecture, and further entries of the configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, **LAYERS}),
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, **LAYERS}),
    "qwen2_5": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi": ("Phi3", {"partial_rotary_factor": 0.75}),
    "smollm2": ("Llama", {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 4}),
    "granite": ("Granite", {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                            "residual_multiplier": 0.22, "tie_word_embeddings": True}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    }}),
}  # fmt: skip
# ExecuTorch 1.5 leaves out the caps of attention of gemma2, and has another GELU for both.
LEAST_DB = {"gemma2": 30, "gemma": 60}
PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "hidden_dim": 96}
CHECKPOINT = 'params_file = "params.json"\nweights = "{}"'
TOKENS = tuple(range(3, 43))


def logits_of(folder: Path, table: str, keep: str = "") -> torch.Tensor:
    """Return the logits of the FP32 decoder of a manifest with `table`; `keep` takes the checkpoint of the decoder."""
    manifest = folder / "suite.toml"
    head = f'[suite]\nname = "{folder.name}"\ndescription = "d"\nprecisions = ["16a8w"]\n'
    manifest.write_text(f"{head}[case.c.generate]\ncontext = 64\nprompts = [[1]]\n{table}\n")
    [case] = load_suite(manifest).cases
    (work := folder / f"work{keep}").mkdir()
    decoder = make_decoder(Job(case, Target("SM8650", "htp", "16a8w")), work)
    if keep:
        (work / "checkpoint.pth").rename(folder / keep)
    with torch.no_grad():
        return ReferenceDecoder(decoder, case).fp32.logits(TOKENS)


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_hugging_face_folder_makes_the_decoder_that_it_is_of(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, further = MODELS[name]
    suffix = "TextConfig" if kind == "Gemma3" else "Config"
    config = getattr(transformers, f"{kind}{suffix}")(**{**SIZES, **further})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        # Weights are drawn larger than in transformers, so that an error in any part of the model shows.
        parameter.normal_(0.0 if parameter.ndim > 1 else 0.5, 0.2)
    model.save_pretrained(tmp_path / "model")
    expected = model(torch.tensor([TOKENS])).logits[0].float()
    found = logits_of(tmp_path, f'architecture = "{name}"\nhugging_face = "model"')
    assert decibels(expected, found) > LEAST_DB.get(name, 110)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_a_checkpoint_makes_the_decoder_that_it_is_of(name: str, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    expected = logits_of(tmp_path, 'params_file = "params.json"', keep="drawn.pth")
    state = torch.load(tmp_path / "drawn.pth", weights_only=True)
    if name.endswith(".pth"):
        torch.save({"model": state}, tmp_path / name)
    else:
        save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / name)
    assert decibels(expected, logits_of(tmp_path, CHECKPOINT.format(name))) == math.inf


class Attack:
    """Attack of a pickle that is loaded without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("attacked",))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "run code"), ({"a": Attack()}, "run code"), ({"a": torch.zeros(2)}, "layers.0.attention.wq")],
)
def test_a_file_that_is_no_checkpoint_of_the_decoder_is_refused(tmp_path: Path, content: Any, problem: str) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    (tmp_path / "weights.pth").write_bytes(b"no tensors")
    if content is not None:
        torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match=rf"case\.c\.generate\.weights: weights\.pth.*{problem}"):
        logits_of(tmp_path, CHECKPOINT.format("weights.pth"))


def test_references_have_two_logarithms_of_probabilities() -> None:
    # Probabilities 1/4 and 3/4, then 1/2 each, and a last token without a successor.
    logits = torch.tensor([[0.0, np.log(3.0)], [5.0, 5.0], [1.0, 9.0]])
    found = log_probabilities(logits, (1, 0, 1)).numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.exp(found[:2]), [[1 / 4, 3 / 4], [1 / 2, 1 / 2]], rtol=1e-6)
    assert not found[2].any()
