"""Makes decoders of the weights that users have, and prints how near they come to the model that these are of.

Hugging Face folders are written by transformers, which is the model as well; a checkpoint is of the decoder itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from farm.base.errors import ConfigError
from farm.builds.compile.llm.compiler import ReferenceDecoder, make_decoder
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
TOKENS = tuple(range(3, 43))


def main() -> None:
    """Print a JSON object: dB by the form of the weights, or the refusal."""
    torch.manual_seed(0)
    chosen = sys.argv[1:] or [*MODELS]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found: dict[str, Any] = {name: hugging_face(root / name, name) for name in chosen}
        if not sys.argv[1:]:
            found |= {name: checkpoint(root / name.strip("."), name) for name in (".pth", ".safetensors")}
            found |= {name: refusal(root / name, name) for name in ("no_tensors", "other_names", "code")}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def hugging_face(folder: Path, name: str) -> float | str:
    """Return how near a decoder of a Hugging Face folder is to transformers, in dB."""
    kind, further = MODELS[name]
    suffix = "TextConfig" if kind == "Gemma3" else "Config"
    config = getattr(transformers, f"{kind}{suffix}")(**{**SIZES, **further})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        # Weights are drawn larger than in transformers, so that an error in any part of the model shows.
        parameter.normal_(0.0 if parameter.ndim > 1 else 0.5, 0.2)
    model.save_pretrained(folder / "model")
    expected = model(torch.tensor([TOKENS])).logits[0].float()
    try:
        return decibels(expected, logits_of(folder, f'architecture = "{name}"\nhugging_face = "model"'))
    except Exception as error:  # noqa: BLE001 - it is told
        return f"{type(error).__name__}: {error}"[:600]


PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "hidden_dim": 96}


def checkpoint(folder: Path, suffix: str) -> float:
    """Return the SQNR in dB of a checkpoint's decoder against the saved model."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS))
    with decoder_of(folder, 'params_file = "params.json"', keep=folder / "drawn.pth") as decoder_references:
        expected = decoder_references.fp32(TOKENS)
    state = torch.load(folder / "drawn.pth", weights_only=True)
    if suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / f"weights{suffix}")
    else:
        torch.save({"model": state}, folder / f"weights{suffix}")
    return decibels(expected, logits_of(folder, f'params_file = "params.json"\nweights = "weights{suffix}"'))


class Attack:
    """Attack of a pickle that is loaded without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("attacked",))


def refusal(folder: Path, name: str) -> str:
    """Return the refusal of a file that is no checkpoint of the decoder."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS))
    path = folder / "weights.pth"
    match name:
        case "no_tensors":
            path.write_bytes(b"no tensors")
        case "other_names":
            torch.save({"a": torch.zeros(2)}, path)
        case "code":
            torch.save({"a": Attack()}, path)
    try:
        logits_of(folder, 'params_file = "params.json"\nweights = "weights.pth"')
    except ConfigError as error:
        return str(error).replace(str(folder), "")
    return "not refused"


def logits_of(folder: Path, table: str) -> torch.Tensor:
    """Return the logits of the FP32 decoder that a manifest with `table` describes."""
    with decoder_of(folder, table) as decoder_references:
        return decoder_references.fp32(TOKENS)


@contextmanager
def decoder_of(folder: Path, table: str, keep: Path | None = None) -> Iterator[ReferenceDecoder]:
    """Yield the decoder; `keep` takes the checkpoint that it was made of."""
    manifest = folder / "suite.toml"
    head = f'[suite]\nname = "{folder.name}"\ndescription = "d"\nprecisions = ["16a8w"]\n'
    manifest.write_text(f"{head}[case.c.generate]\ncontext = 64\nprompts = [[1]]\n{table}\n")
    [case] = load_suite(manifest).cases
    with tempfile.TemporaryDirectory() as work:
        decoder = make_decoder(Job(case, Target("SM8650", "htp", "16a8w")), Path(work))
        if keep is not None:
            keep.write_bytes(Path(work, "checkpoint.pth").read_bytes())
        yield ReferenceDecoder(decoder, case)


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the signal to noise ratio."""
    return round(float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum())), 1)


if __name__ == "__main__":
    main()
