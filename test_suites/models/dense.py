"""Detection, segmentation, keypoints, super-resolution: pixels [1, 3, size, size] to something for every place."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    ResNetBackbone,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from .settle import settle

_MOST_IMAGES = 16


def _images(size: int) -> Tensor:
    """Return the images that weights are scaled on: fewer of large ones, which have more places each."""
    return torch.randn(max(2, min(_MOST_IMAGES, 2**20 // size**2)), 3, size, size)


class SegFormer(nn.Module):
    """Xie et al., 2021: class scores of every fourth pixel, with the class in the last dimension."""

    def __init__(self, classes: int, size: int, **options: Any) -> None:
        super().__init__()
        self.model = SegformerForSemanticSegmentation(
            SegformerConfig(num_labels=classes, attn_implementation="eager", **options)
        )
        settle(self.model, _images(size), heads=[self.model.decode_head.classifier])

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits.permute(0, 2, 3, 1)


class Detr(nn.Module):
    """Carion et al., 2020: class scores [1, queries, classes + 1] and boxes [1, queries, 4] of object queries.

    Images are not padded, so there are no masks, and the position embedding is constant.
    """

    def __init__(self, classes: int, size: int, backbone: dict[str, Any], **options: Any) -> None:
        super().__init__()
        resnet = ResNetConfig(**backbone, out_features=[f"stage{len(backbone['depths'])}"])
        self.detr = DetrForObjectDetection(
            DetrConfig(backbone_config=resnet, num_labels=classes, attn_implementation="eager", **options)
        )
        _thaw(self.detr.model.backbone)
        width = self.detr.config.d_model
        images = _images(size)
        places = self.detr.model.backbone.model(images).feature_maps[-1].shape
        positions = self.detr.model.position_embedding(shape=(1, *places[1:]), device="cpu", dtype=torch.float32)
        self.register_buffer("positions", positions.flatten(2).transpose(1, 2))
        self.register_buffer("queries", torch.randn(1, self.detr.config.num_queries, width))
        settle(self, images, heads=[self.detr.class_labels_classifier])

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        model = self.detr.model
        features = model.backbone.model(pixels).feature_maps[-1]
        hidden = model.input_projection(features).flatten(2).transpose(1, 2)
        for layer in model.encoder.layers:
            hidden = layer(hidden, None, spatial_position_embeddings=self.positions)
        objects = self.queries.expand(pixels.shape[0], -1, -1)
        places = model.query_position_embeddings.weight.unsqueeze(0)
        for layer in model.decoder.layers:
            objects = layer(objects, None, self.positions, places, hidden)
        objects = model.decoder.layernorm(objects)
        return self.detr.class_labels_classifier(objects), self.detr.bbox_predictor(objects).sigmoid()


def _thaw(module: nn.Module) -> None:
    """Replace DETR's frozen batch norms, which compute their factors anew at every inference, by torch's."""
    for name, child in module.named_children():
        if type(child).__name__ == "DetrFrozenBatchNorm2d":
            setattr(module, name, nn.BatchNorm2d(child.weight.shape[0]))
        else:
            _thaw(child)


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


class _CrossStage(nn.Module):
    """The C2f block of YOLOv8: the channels are split, one half goes through bottlenecks, all stages are joined."""

    def __init__(self, inputs: int, outputs: int, depth: int, *, residual: bool) -> None:
        super().__init__()
        self.half = outputs // 2
        self.enter = _convolution(inputs, outputs, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(_convolution(self.half, self.half), _convolution(self.half, self.half)) for _ in range(depth)
        )
        self.leave = _convolution((2 + depth) * self.half, outputs, 1)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).split(self.half, dim=1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]) if self.residual else block(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Yolo(nn.Module):
    """A detector in the manner of YOLOv8: cross-stage backbone, two-way feature pyramid, heads without anchors.

    Two levels, at 1/8 and 1/16 of the image. Gives boxes [1, cells, 4], as distances from the middle of a cell to its
    sides, in cells, and class scores [1, cells, classes].
    """

    def __init__(self, classes: int, size: int, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        low, high = 4 * width, 8 * width
        self.stem = nn.Sequential(
            _convolution(3, width, 3, 2),
            _convolution(width, 2 * width, 3, 2),
            _CrossStage(2 * width, 2 * width, depth, residual=True),
        )
        self.stage3 = nn.Sequential(_convolution(2 * width, low, 3, 2), _CrossStage(low, low, depth, residual=True))
        self.stage4 = nn.Sequential(_convolution(low, high, 3, 2), _CrossStage(high, high, depth, residual=True))
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.pooled = _convolution(4 * high, high, 1)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.top_down = _CrossStage(high + low, low, depth, residual=False)
        self.down = _convolution(low, low, 3, 2)
        self.bottom_up = _CrossStage(low + high, high, depth, residual=False)
        self.boxes = nn.ModuleList(self._head(channels, 4) for channels in (low, high))
        self.scores = nn.ModuleList(self._head(channels, classes) for channels in (low, high))
        settle(self, _images(size), heads=[head[-1] for head in self.scores])

    @staticmethod
    def _head(channels: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(_convolution(channels, channels // 2), nn.Conv2d(channels // 2, outputs, 1))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        low = self.stage3(self.stem(pixels))
        high = self.stage4(low)
        once = self.pool(high)
        twice = self.pool(once)
        high = self.pooled(torch.cat([high, once, twice, self.pool(twice)], 1))
        low = self.top_down(torch.cat([self.up(high), low], 1))
        levels = [low, self.bottom_up(torch.cat([self.down(low), high], 1))]
        boxes = [head(level).flatten(2) for head, level in zip(self.boxes, levels, strict=True)]
        scores = [head(level).flatten(2) for head, level in zip(self.scores, levels, strict=True)]
        return torch.relu(torch.cat(boxes, 2)).transpose(1, 2), torch.cat(scores, 2).transpose(1, 2)


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding and batch norms: class scores of every pixel, class last."""

    def __init__(self, classes: int, size: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_twice(*pair) for pair in itertools.pairwise([3, *widths]))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in pairs)
        self.merge = nn.ModuleList(_twice(wide, narrow) for wide, narrow in pairs)
        self.classify = nn.Conv2d(width, classes, 1)
        settle(self, _images(size), heads=[self.classify])

    def forward(self, pixels: Tensor) -> Tensor:
        kept = [self.down[0](pixels)]
        for block in self.down[1:]:
            kept.append(block(self.pool(kept[-1])))
        x = kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.classify(x).permute(0, 2, 3, 1)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class SimplePose(nn.Module):
    """Xiao et al., "Simple baselines for human pose estimation", 2018: heat maps [1, keypoints, places], flattened.

    A ResNet, then transposed convolutions up to a quarter of the image.
    """

    def __init__(self, keypoints: int, size: int, backbone: dict[str, Any], width: int, upsamplings: int) -> None:
        super().__init__()
        config = ResNetConfig(**backbone, out_features=[f"stage{len(backbone['depths'])}"])
        self.backbone = ResNetBackbone(config)
        layers: list[nn.Module] = []
        channels = config.hidden_sizes[-1]
        for _ in range(upsamplings):
            layers += [nn.ConvTranspose2d(channels, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.upsample = nn.Sequential(*layers, nn.Conv2d(channels, keypoints, 1))
        settle(self, _images(size))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.upsample(self.backbone(pixels).feature_maps[-1]).flatten(2)


class Edsr(nn.Module):
    """Lim et al., "Enhanced deep residual networks for single image super-resolution", 2017.

    Gives pixels [1, 3, scale size, scale size]; `scale` is a power of two.
    """

    def __init__(self, size: int, width: int, blocks: int, scale: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.body = nn.Conv2d(width, width, 3, padding=1)
        steps: list[nn.Module] = []
        for _ in range(int(math.log2(scale))):
            steps += [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)]
        self.tail = nn.Sequential(*steps, nn.Conv2d(width, 3, 3, padding=1))
        settle(self, _images(size) * 0.3 + 0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        first = self.head(pixels)
        x = first
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.tail(first + self.body(x))
