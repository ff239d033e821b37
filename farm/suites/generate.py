"""Case of text generation: decoder, compiler settings and prompts. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import IllegalTargetError

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
    """Architecture, which decides layers and quantization recipe: a name of `farm.suites.architectures`."""
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
    """Tokenizer: a file, its folder, or `bytes`: farm/suites/accuracy/tokenizer.py."""
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
