"""Image classifiers: pixels of shape [1, 3, size, size] to logits of shape [1, classes]."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .settle import settle

_BATCH = 16
"""Images that weights are scaled on."""


class Classifier(nn.Module):
    """An architecture of transformers: `ViT` is ViTConfig and ViTForImageClassification, `options` are the config's."""

    def __init__(self, architecture: str, classes: int, size: int, **options: Any) -> None:
        super().__init__()
        config = getattr(transformers, f"{architecture}Config")(num_labels=classes, image_size=size, **options)
        self.model = getattr(transformers, f"{architecture}ForImageClassification")(config)
        _as_accelerators_want_it(self.model)
        head = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)][-1]
        settle(self.model, torch.randn(_BATCH, 3, size, size), heads=[head])

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits


def _as_accelerators_want_it(model: nn.Module) -> None:
    """Replace two forms of EfficientNet by what computes the same."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.AvgPool2d):
            # The window is larger than the image: HTP would leave the pooling to the CPU.
            model.set_submodule(name, nn.AdaptiveAvgPool2d(1))
        elif isinstance(layer, nn.Conv2d) and isinstance(layer.padding, str):
            # ExecuTorch's quantizer gives weights a scale per channel only where padding has numbers.
            same = layer.padding == "same"
            layer.padding = tuple(size // 2 if same else 0 for size in layer.kernel_size)


class MobileNetV3(nn.Module):
    """Howard et al., "Searching for MobileNetV3", 2019: inverted bottlenecks, squeeze and excitation, hardswish.

    `blocks` are rows of kernel, expanded channels, channels, squeeze and excitation (0 or 1), hardswish (0 or 1; ReLU),
    stride.
    """

    def __init__(self, classes: int, size: int, blocks: list[list[int]], last: int = 576, hidden: int = 1024) -> None:
        super().__init__()
        channels = 16
        layers: list[nn.Module] = [_convolution(3, channels, 3, 2, activation=nn.Hardswish)]
        for kernel, expanded, out, squeeze, swish, stride in blocks:
            layers.append(_InvertedBottleneck(channels, kernel, expanded, out, bool(squeeze), bool(swish), stride))
            channels = out
        layers.append(_convolution(channels, last, 1, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(last, hidden), nn.Hardswish(), nn.Linear(hidden, classes))
        settle(self, torch.randn(_BATCH, 3, size, size), heads=[self.classifier[-1]])

    def forward(self, pixels: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(pixels)).flatten(1))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, groups: int = 1, activation: type[nn.Module] | None
) -> nn.Sequential:
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = max(8, channels // 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class _InvertedBottleneck(nn.Module):
    def __init__(
        self, inputs: int, kernel: int, expanded: int, outputs: int, squeeze: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers.append(_convolution(inputs, expanded, 1, activation=activation))
        layers.append(_convolution(expanded, expanded, kernel, stride, groups=expanded, activation=activation))
        if squeeze:
            layers.append(_SqueezeExcitation(expanded))
        layers.append(_convolution(expanded, outputs, 1, activation=None))
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)
