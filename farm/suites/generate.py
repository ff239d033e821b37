"""Cases that generate text: their tables in a manifest, and the architectures of their models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import IllegalTargetError, UnknownNameError

# Decoders for text generation: shapes, published sizes and upstream's names.
#
# Torch-free. Sizes come from `examples/models/*/config/*.json` of ExecuTorch 1.5, and from Meta's `params.json`.


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Decoder of ExecuTorch's Qualcomm examples, or a family of decoders."""

    name: str
    upstream: str
    """Name in `SUPPORTED_LLM_MODELS` of ExecuTorch's Qualcomm examples, which decides class and source changes; for a
    family the name of a member."""
    params: dict[str, Any]
    """Parameters of `params.json`: for a family all but sizes, for a published decoder all."""
    recipe: str = ""
    """The precision that upstream's own recipe of this decoder is for; "" for a family, which has the general ones."""
    shards: int = 1
    """Number of contexts into which upstream divides the layers."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in a Hugging Face `config.json`; empty if upstream converts no such weights."""
    hadamard: bool = False
    """Queries and keys are turned by a Hadamard matrix, which requires a head size that is a power of two."""
    window_mask: bool = False
    """True if layers with a sliding window take their own mask as a second input."""

    @property
    def published(self) -> bool:
        """True if the sizes are known, so that a case may omit them."""
        return "dim" in self.params


# Parameters that `LlamaModel` of ExecuTorch 1.5's Qualcomm examples reads, and further ones of Meta's files, by type.
_PARAMS: dict[type, tuple[str, ...]] = {
    int: (
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "head_dim", "multiple_of",
        "rope_scale_factor", "no_rope_layer_interval", "sliding_window", "bos_idx", "eos_idx",
    ),
    float: (
        "norm_eps", "ffn_dim_multiplier", "rope_theta", "rope_freq_base", "local_rope_theta", "partial_rotary_factor",
        "embedding_scale_factor", "attention_multiplier", "residual_multiplier", "logits_scaling",
        "attn_logit_softcapping", "final_logit_softcapping",
    ),
    bool: (
        "use_scaled_rope", "use_hf_rope", "attention_qkv_bias", "use_qk_norm", "qk_norm_before_rope",
        "use_ffn_norm", "post_attention_norm", "post_ffn_norm", "output_bias", "apply_embedding",
    ),
    str: ("norm_type", "act_fn", "model_architecture"),
    list: ("layer_types",),
}  # fmt: skip
PARAM_TYPES: dict[str, type] = {name: kind for kind, names in _PARAMS.items() for name in names}
"""Types by parameter."""

_LLAMA = {"norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True}
_GEMMA = {
    "act_fn": "gelu", "norm_type": "gemma3", "norm_eps": 1e-6, "rope_theta": 10000.0, "use_hf_rope": True,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "act_fn": "gelu_approx", "post_attention_norm": True, "post_ffn_norm": True,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "local_rope_theta": 10000.0,
    "sliding_window": 4096,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "act_fn": "gelu_approx", "post_attention_norm": True, "post_ffn_norm": True, "rope_theta": 1000000.0,
    "local_rope_theta": 10000.0, "use_qk_norm": True, "qk_norm_before_rope": True, "sliding_window": 512,
}  # fmt: skip
_QWEN2_5 = {"norm_eps": 1e-6, "rope_theta": 1000000.0, "use_hf_rope": True, "attention_qkv_bias": True}
_QWEN3 = {"norm_eps": 1e-6, "rope_theta": 1000000.0, "use_qk_norm": True, "qk_norm_before_rope": True}
_PHI = {"norm_eps": 1e-5, "rope_theta": 10000.0, "use_hf_rope": True, "partial_rotary_factor": 0.75}
_SMOLLM2 = {"norm_eps": 1e-5, "rope_theta": 100000.0}
_SMOLLM3 = {"norm_eps": 1e-6, "rope_theta": 5000000.0, "no_rope_layer_interval": 4}
_GLM = {"norm_eps": 1e-5, "rope_theta": 10000.0, "use_hf_rope": True, "model_architecture": "GlmForCausalLM"}
_GRANITE = {
    "norm_eps": 1e-5, "rope_theta": 10000000.0, "attention_multiplier": 0.015625, "embedding_scale_factor": 12.0,
    "residual_multiplier": 0.22, "logits_scaling": 8.0, "act_fn": "silu",
}  # fmt: skip
_CODEGEN = {
    "norm_eps": 1e-5, "use_hf_rope": True, "partial_rotary_factor": 0.5, "use_ffn_norm": False,
    "norm_type": "layernorm", "output_bias": True, "model_architecture": "CodeGenModel",
}  # fmt: skip
_STORIES = {"norm_eps": 1e-5}


SIZES = ("n_layers", "dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size")
"""Parameters that identify a published decoder."""

_GEMMA2_LAYERS = ["sliding_attention", "full_attention"] * 13
_GEMMA3_LAYERS = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2

_FAMILIES = (
    Architecture(name="llama", upstream="llama3_2-1b_instruct", params=_LLAMA, model_types=("llama",)),
    Architecture(name="gemma", upstream="gemma-2b", params=_GEMMA, model_types=("gemma",)),
    Architecture(name="gemma2", upstream="gemma2-2b", params=_GEMMA2, model_types=("gemma2",), window_mask=True),
    Architecture(name="gemma3", upstream="gemma3-1b", params=_GEMMA3, model_types=("gemma3_text",), window_mask=True),
    Architecture(name="qwen2_5", upstream="qwen2_5-0_5b", params=_QWEN2_5, model_types=("qwen2",), hadamard=True),
    Architecture(name="qwen3", upstream="qwen3-0_6b", params=_QWEN3, model_types=("qwen3",)),
    Architecture(name="phi", upstream="phi_4_mini", params=_PHI, model_types=("phi3",)),
    Architecture(name="smollm2", upstream="smollm2_135m", params=_SMOLLM2, model_types=("llama",), hadamard=True),
    Architecture(name="smollm3", upstream="smollm3-3b", params=_SMOLLM3, model_types=("smollm3",)),
    Architecture(name="glm", upstream="glm-1_5b", params=_GLM, model_types=("glm",)),
    Architecture(name="granite", upstream="granite_3_3-2b_instruct", params=_GRANITE, model_types=("granite",)),
    Architecture(name="codegen", upstream="codegen2_1b", params=_CODEGEN),
    Architecture(name="stories", upstream="stories260k", params=_STORIES),
)
ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in _FAMILIES}


def _publish(
    family: str, name: str, recipe: str, *sizes: int, layer_types: list[str] | None = None, **more: Any
) -> None:
    """Add a published decoder of a family; `sizes` are the values of SIZES and, if given, `head_dim`."""
    params = {**ARCHITECTURES[family].params, **dict(zip((*SIZES, "head_dim"), sizes, strict=False))}
    params |= {"layer_types": layer_types} if layer_types else {}
    ARCHITECTURES[name] = msgspec.structs.replace(
        ARCHITECTURES[family], name=name, upstream=name, recipe=recipe, params=params, **more
    )


_publish("stories", "stories260k", "16a4w", 5, 64, 172, 8, 4, 512)
_publish("stories", "stories110m", "16a4w", 12, 768, 2048, 12, 12, 32000)
_publish("llama", "llama3_2-1b_instruct", "16a4w_block", 16, 2048, 8192, 32, 8, 128256)
_publish("llama", "llama3_2-3b_instruct", "16a4w_block", 28, 3072, 8192, 24, 8, 128256, shards=3)
_publish("codegen", "codegen2_1b", "16a8w", 16, 2048, 8192, 16, 16, 51200)
_publish("gemma", "gemma-2b", "16a4w", 18, 2048, 16384, 8, 1, 256000, 256, shards=4)
_publish("gemma2", "gemma2-2b", "16a4w", 26, 2304, 9216, 8, 4, 256000, 256, shards=4, layer_types=_GEMMA2_LAYERS)
_publish("gemma3", "gemma3-1b", "16a4w", 26, 1152, 6912, 4, 1, 262144, 256, layer_types=_GEMMA3_LAYERS)
_publish("glm", "glm-1_5b", "16a4w", 28, 2048, 6144, 16, 4, 59264, 128)
_publish("granite", "granite_3_3-2b_instruct", "16a4w", 40, 2048, 8192, 32, 8, 49159)
_publish("phi", "phi_4_mini", "16a4w", 32, 3072, 8192, 24, 8, 200064, shards=8)
_publish("qwen2_5", "qwen2_5-0_5b", "16a4w", 24, 896, 4864, 14, 2, 151936)
_publish("qwen2_5", "qwen2_5-1_5b", "16a4w", 28, 1536, 8960, 12, 2, 151936)
_publish("qwen3", "qwen3-0_6b", "16a4w", 28, 1024, 3072, 16, 8, 151936, 128)
_publish("qwen3", "qwen3-1_7b", "16a4w", 28, 2048, 6144, 16, 8, 151936, 128, hadamard=True)
_publish("smollm2", "smollm2_135m", "16a8w", 30, 576, 1536, 9, 3, 49152)
_publish("smollm3", "smollm3-3b", "16a4w", 36, 2048, 11008, 16, 4, 128256, shards=4)

# Families whose embeddings are scaled by the square root of their width.
_SCALED_EMBEDDINGS = ("gemma",)

# Name in `config.json` of Hugging Face's transformers, by the name in `params.json`.
_HUGGING_FACE = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "local_rope_theta": "rope_local_base_freq",
    "partial_rotary_factor": "partial_rotary_factor",
    "layer_types": "layer_types",
    "sliding_window": "sliding_window",
    "attention_multiplier": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_scaling",
    "embedding_scale_factor": "embedding_multiplier",
}


def find_architecture(name: str) -> Architecture:
    """Return the architecture called `name`. Raises UnknownNameError with the nearest name."""
    if name not in ARCHITECTURES:
        raise UnknownNameError("architecture", name, ARCHITECTURES)
    return ARCHITECTURES[name]


def complete_params(architecture: Architecture, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole `params.json`: the values of a case, completed by the architecture's values.

    Sizes of a published decoder do not mix with others: if `given` has a width, the other sizes come from the family,
    unless all are given.
    """
    known = dict(architecture.params)
    is_itself = architecture.published and all(given.get(name) == known[name] for name in SIZES)
    if "dim" in given and not is_itself:
        known = {name: value for name, value in known.items() if name not in {*SIZES, "head_dim", "layer_types"}}
    params = {**known, **given}
    if architecture.upstream.startswith(_SCALED_EMBEDDINGS) and "dim" in params:
        params.setdefault("embedding_scale_factor", float(params["dim"]) ** 0.5)
    return params


def params_of_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a Hugging Face `config.json` by the names of `params.json`."""
    # transformers 5 has `rope_parameters`, with the base among them, in place of `rope_theta` and `rope_scaling`.
    given = config.get("rope_parameters") or config.get("rope_scaling")
    rope = given if isinstance(given, dict) else {}
    known = {**config, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    found = {name: known[key] for name, key in _HUGGING_FACE.items() if known.get(key) is not None}
    if config.get("model_type") == "llama":
        found["use_scaled_rope"] = rope.get("rope_type", rope.get("type")) == "llama3"
        factor = rope.get("factor")
        if found["use_scaled_rope"] and isinstance(factor, int | float) and math.isfinite(factor):
            found["rope_scale_factor"] = int(factor)
    if isinstance(interval := config.get("no_rope_layer_interval"), int):
        found["no_rope_layer_interval"] = interval
    return found


# Case of text generation: decoder, compiler settings and prompts. Torch-free.


Mode = Literal["kv", "hybrid", "lookahead"]
PRECISIONS_OF_TEXT = ("16a8w", "16a4w", "16a4w_block")
"""Precisions of decoders. In 8a8w ExecuTorch's own decoder reaches -58 dB without an error (1.5.1, measured)."""
DECODE, PREFILL = "kv_forward", "prefill_forward"
"""Methods of a static decoder."""
BYTES = "bytes"
"""In place of a tokenizer's file: each byte of a text in UTF-8 is a token."""
TOKENIZER_FILES = (".json", ".model")
"""Suffixes of a tokenizer's file; names with other suffixes are folders."""
_Length = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

# Fields that name a file or a folder.
_NAMING = (
    "params_file", "weights", "hugging_face", "prompts_file", "score_file", "expected_file", "tokenizer", "score_text",
    "task",
)  # fmt: skip


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A static decoder of ExecuTorch's Qualcomm examples, greedy; or a `.pte` of that kind, which a case names."""

    architecture: str = "llama"
    """Architecture, which decides layers and quantization recipe: a name of `farm.suites.generate`."""
    mode: Mode = "kv"
    """`hybrid` has a second method for prompts; `lookahead` decodes several positions at once."""
    params: dict[str, Any] = {}
    """As in a `params.json` (`dim`, `n_layers`, ...): weights are drawn from the seed of the case."""
    params_file: str = ""
    """A `params.json`, in place of `params`; with `weights`, relative to the folder of the suite."""
    weights: str = ""
    """A checkpoint: `.pth`, `.pt` or `.safetensors`, with the names of the static decoder."""
    hugging_face: str = ""
    """A local folder with `config.json` and `*.safetensors`, in place of all three."""
    context: _Length = 128
    """Most positions of a sequence: prompt and generated tokens."""
    prefill: _Length = 32
    """Positions that one call of `prefill_forward` takes; hybrid alone."""
    window: _Length = 4
    """With `ngram` and `gcap`: of lookahead."""
    ngram: _Length = 3
    gcap: _Length = 4
    new: _Length = 16
    """Tokens that are generated after each prompt; fewer where the context, or a stop token, ends it."""
    stop: tuple[int, ...] = ()
    """Tokens after which nothing more is generated."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids; each prompt is a sample."""
    texts: tuple[str, ...] = ()
    """Prompts in words, with a `tokenizer`; each is a sample, and its logits are judged."""
    prompts_file: str = ""
    """`.json` (a list of lists of token ids) or `.npy` (one row a prompt, -1 after its end)."""
    prompt_lengths: tuple[_Length, ...] = ()
    """Prompts of so many tokens, drawn from the seed of the case, where there are no others."""
    score_file: str = ""
    """Sequences whose logits are judged, one per prompt, as in `prompts_file`. Without it: each prompt followed by the
    quantized module's tokens."""
    expected_file: str = ""
    """With a `.pte`: the tokens that have to be generated after each prompt, as `prompts_file`."""
    tokenizer: str = ""
    """Tokenizer: a file, its folder, or `bytes`: farm/suites/prompts.py."""
    score_text: str = ""
    """A text, in UTF-8, whose perplexity is measured, in place of prompts."""
    wikitext: bool = False
    """The text is a page of wikitext as data sets have it: scored without its marks, its words counted with them."""
    windows: _Length | None = None
    """At most so many pieces of it, from its beginning; None is all of them."""
    task: str = ""
    """A multiple choice task in lm-eval's YAML, in place of prompts or beside a text."""
    documents: _Length | None = None
    """At most so many of its questions, from the first; None is all of them."""
    prefix: tuple[int, ...] | Literal["config"] = ()
    """Tokens at the beginning of each text and question; `config`: `bos_token_id`, else `eos_token_id`, in
    `config.json` of `hugging_face`, as in lm-eval."""

    @property
    def scores_likelihood(self) -> bool:
        """Return whether the case only scores the likelihood of given sequences."""
        return bool(self.score_text or self.task)

    @property
    def new_tokens(self) -> int:
        """Return how many tokens are generated after each prompt, at most."""
        return 1 if self.scores_likelihood else self.new

    @property
    def decode(self) -> int:
        """Return how many positions one call of `kv_forward` takes."""
        if self.mode != "lookahead":
            return 1
        # ExecuTorch 1.5, `process_model_args` of its Qualcomm examples: the next power of two.
        return 1 << ((self.window + self.gcap) * (self.ngram - 1) - 1).bit_length()

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods of the program that is compiled."""
        return (DECODE,) if self.mode == "kv" else (DECODE, PREFILL)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the folders among `files`."""
        is_file = self.tokenizer == BYTES or self.tokenizer.endswith(TOKENIZER_FILES)
        return tuple(name for name in (self.hugging_face, "" if is_file else self.tokenizer) if name)

    @property
    def without_files(self) -> Generate:
        """Return the same as if it named no file and no folder."""
        return msgspec.structs.replace(self, **dict.fromkeys(_NAMING, ""))

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files and folders that it names, relative to the folder of the suite."""
        named = ((name, getattr(self, name)) for name in _NAMING)
        return tuple(value for name, value in named if value and (name, value) != ("tokenizer", BYTES))


def require_for_text(name: str, backend: str, *, direct: bool) -> None:
    """Raise IllegalTargetError unless a case called `name` can generate text on `backend`."""
    if direct or not find_backend(backend).generates_text:
        able = " or ".join(one.name for one in BACKENDS.values() if one.generates_text)
        where = "direct mode" if direct else f"the {backend} backend"
        raise IllegalTargetError(f"{name} generates text, which is for the {able} backend, not for {where}")
