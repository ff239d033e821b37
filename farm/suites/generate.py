"""A case that generates text: which decoder, what it is compiled with, and what it is asked. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Mode = Literal["kv", "hybrid", "lookahead"]
_Length = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A static decoder of ExecuTorch's Qualcomm examples, greedy; or a `.pte` of that kind, which a case names."""

    architecture: str = "llama"
    """What decides of layers and of the quantization recipe: a name of `farm.suites.architectures`."""
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
    """Positions that a sequence may have: prompt and what is generated."""
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
    prompts_file: str = ""
    """`.json` (a list of lists of token ids) or `.npy` (one row a prompt, -1 after its end)."""
    prompt_lengths: tuple[_Length, ...] = ()
    """Prompts of so many tokens, drawn from the seed of the case, where there are no others."""
    score_file: str = ""
    """Sequences whose logits are judged, one for each prompt, as `prompts_file`. Without it: each prompt with what the
    quantized module generates after it."""

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files and folders that it names, relative to the folder of the suite."""
        named = (self.params_file, self.weights, self.hugging_face, self.prompts_file, self.score_file)
        return tuple(name for name in named if name)
