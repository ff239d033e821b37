"""Text encoders and a decoder: token numbers, as int32, to hidden states or logits."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .settle import settle

_BATCH = 4
"""Least number of sequences for the scaling of weights."""

_TOKENS = 16
"""Least number of tokens for the scaling of a decoder's weights."""

_HIDDEN = -50.0
"""Value added to the score of masked positions: their share is below 1e-20, and 16 bits resolve the other scores."""


class TextClassifier(nn.Module):
    """Encoder of transformers: `Bert` means BertConfig and BertForSequenceClassification; `options` are the config's.

    Inputs: tokens, and a mask (1.0 for tokens, 0.0 for padding), both [1, length]. Output: logits [1, classes].
    """

    def __init__(self, architecture: str, classes: int, length: int, vocabulary: int, **options: Any) -> None:
        super().__init__()
        config = getattr(transformers, f"{architecture}Config")(
            num_labels=classes,
            vocab_size=vocabulary,
            max_position_embeddings=length,
            attn_implementation="eager",
            **options,
        )
        self.model = getattr(transformers, f"{architecture}ForSequenceClassification")(config)
        self.register_buffer("places", torch.arange(length)[None])
        tokens = torch.randint(0, vocabulary, (4 * _BATCH, length))
        settle(self, tokens, torch.ones(tokens.shape), heads=[self.model.classifier])

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        bias = (1.0 - mask) * _HIDDEN
        result = self.model(
            input_ids=tokens,
            attention_mask=bias[:, None, None, :],
            token_type_ids=torch.zeros_like(self.places),
            position_ids=self.places,
        )
        return result.logits


class Decoder(nn.Module):
    """Llama that takes `chunk` tokens, and keys and values of `context` earlier tokens.

    Inputs: tokens [1, chunk]; the position of the first [1], from 0 to `context`; then keys and values of every layer
    before it, [1, heads, context, width]. Outputs: logits [1, chunk, vocabulary]; then keys and values of the new
    tokens, [1, heads, chunk, width], which the caller puts into the cache. So no shape depends on the position.
    """

    def __init__(self, chunk: int, context: int, vocabulary: int, **options: Any) -> None:
        super().__init__()
        config = transformers.LlamaConfig(vocab_size=vocabulary, attn_implementation="eager", **options)
        llama = transformers.LlamaForCausalLM(config)
        self.model, self.head = llama.model, llama.lm_head
        starts = torch.arange(context + 1)[:, None] + torch.arange(chunk)
        cos, sin = self.model.rotary_emb(torch.zeros(1), starts)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        earlier = torch.arange(context) < torch.arange(context + 1)[:, None]
        new = torch.ones(chunk, chunk).tril().bool()
        seen = torch.cat([earlier[:, None].expand(-1, chunk, -1), new.expand(context + 1, -1, -1)], 2)
        self.register_buffer("mask", torch.where(seen, 0.0, _HIDDEN))
        batch = max(_BATCH, _TOKENS // chunk)
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        self.head.bias = nn.Parameter(torch.zeros(vocabulary))
        settle(
            self,
            torch.randint(0, vocabulary, (batch, chunk)),
            torch.full((1,), context),
            *[torch.randn(shape) for _ in range(2 * config.num_hidden_layers)],
            heads=[self.head],
        )

    def forward(self, tokens: Tensor, position: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        hidden = self.model.embed_tokens(tokens)
        mask = self.mask[position][:, None]
        kept = _Cache(cache)
        for layer in self.model.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                past_key_values=kept,
                position_embeddings=(self.cos[position], self.sin[position]),
            )
        return (self.head(self.model.norm(hidden)), *kept.new)


class _Cache:
    """Cache for an attention of transformers: returns earlier and new keys and values, and stores the new ones."""

    def __init__(self, earlier: tuple[Tensor, ...]) -> None:
        self.earlier = earlier
        self.new: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.new += [keys, values]
        earlier = self.earlier[2 * layer : 2 * layer + 2]
        return torch.cat([earlier[0], keys], 2), torch.cat([earlier[1], values], 2)
