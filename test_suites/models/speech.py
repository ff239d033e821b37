"""Speech encoders: sound to hidden states or scores of every frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from .settle import settle

_BATCH = 2
"""Sounds that weights are scaled on."""


class Whisper(nn.Module):
    """The encoder of Whisper (Radford et al., 2022): log-mel [1, bins, 2 frames] to states [1, frames, width]."""

    def __init__(self, frames: int, bins: int, **options: Any) -> None:
        super().__init__()
        config = WhisperConfig(max_source_positions=frames, num_mel_bins=bins, attn_implementation="eager", **options)
        self.encoder = WhisperEncoder(config)
        settle(self.encoder, torch.randn(_BATCH, bins, 2 * frames))

    def forward(self, mel: Tensor) -> Tensor:
        return self.encoder(mel).last_hidden_state


class Wav2Vec2(nn.Module):
    """Baevski et al., 2020, with the head for connectionist temporal classification.

    Samples [1, length] to scores [1, frames, letters].
    """

    def __init__(self, length: int, letters: int, **options: Any) -> None:
        super().__init__()
        config = Wav2Vec2Config(vocab_size=letters, apply_spec_augment=False, mask_time_prob=0.0, **options)
        self.model = Wav2Vec2ForCTC(config)
        # The weight is a function of two parameters, for training alone.
        remove_parametrizations(self.model.wav2vec2.encoder.pos_conv_embed.conv, "weight")
        settle(self.model, torch.randn(_BATCH, length), heads=[self.model.lm_head])

    def forward(self, samples: Tensor) -> Tensor:
        return self.model(input_values=samples).logits
