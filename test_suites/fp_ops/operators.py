"""Modules for what only floating point has."""

from __future__ import annotations

import pkgutil

import torch
from torch import Tensor, nn


class OfChoice(nn.Module):
    """A function, by its dotted name, of a constant where the first input is true, else of the second input.

    The constant comes as text, as `inf` and `nan` are no numbers in a manifest.
    """

    constant: Tensor

    def __init__(self, name: str, value: str) -> None:
        super().__init__()
        self.function = pkgutil.resolve_name(name)
        self.register_buffer("constant", torch.tensor([float(value)]))

    def forward(self, chosen: Tensor, x: Tensor) -> Tensor:
        return self.function(torch.where(chosen, self.constant, x))
