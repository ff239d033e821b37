"""Modules that show a feature of the backend: several methods, buffers beyond VTCM, attention of many heads."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor, nn


class TwoLayers(nn.Module):
    """A linear layer up and one down; `up` is a submodule, and `down` a method."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.back = nn.Linear(hidden, features)

    def down(self, x: Tensor) -> Tensor:
        return torch.relu(self.back(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Peaks(nn.Module):
    """Several wide layers of which each waits for the greatest values of all: more activations than VTCM holds."""

    def __init__(self, features: int, hidden: int, count: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(features, hidden) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(hidden, features) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        wide = [up(x) for up in self.ups]
        peak = reduce(add, [one.amax(dim=1, keepdim=True) for one in wide])
        return reduce(add, [down(one * peak) for down, one in zip(self.downs, wide, strict=True)])


class Looked(nn.Module):
    """Sum of the greatest values of each row and of the entries of a table at their places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, places = torch.topk(x, 3)
        return values + self.table[places]


class _Projection(nn.Module):
    """A linear layer over the last dimension as a 1x1 convolution: ExecuTorch looks for heads behind such alone."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(features, features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).squeeze(1)


class Attention(nn.Module):
    """Attention of many heads, as ExecuTorch's language models have it."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (_Projection(features) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        shape = (batch, length, self.heads, features // self.heads)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = torch.softmax(query @ key.transpose(2, 3) / (features // self.heads) ** 0.5, dim=-1)
        result: Tensor = self.out((scores @ value).transpose(1, 2).reshape(batch, length, features))
        return result


class Cell(nn.Module):
    """A recurrent cell: its second output is the second input of the next inference."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.taken, self.kept, self.out = (nn.Linear(features, features) for _ in range(3))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.taken(x) + self.kept(state))
        return self.out(state), state


class Window(nn.Module):
    """Attends to the last values, which it is given and gives back with the newest in place of the oldest."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(features, features) for _ in range(3))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.cat([keys[:, 1:], self.key(x)], dim=1)
        values = torch.cat([values[:, 1:], self.value(x)], dim=1)
        scores = torch.softmax(self.query(x) @ keys.transpose(1, 2) / keys.shape[2] ** 0.5, dim=-1)
        return scores @ values, keys, values
