"""Modules for the operators that torch.nn has no class for. Shapes and values come from the manifest."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor, nn


class Function(nn.Module):
    """Calls one function of torch by its dotted name: `torch.abs`, `torch.nn.functional.pad`, `torch.Tensor.repeat`.

    The inputs of the case are its positional arguments, `options` its keyword arguments.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        if not name.startswith("torch."):
            raise ValueError(f"{name!r} is not a function of torch: write its full name, as in 'torch.abs'")
        self.function = pkgutil.resolve_name(name)
        self.options = options

    def forward(self, *inputs: Tensor) -> Any:
        result = self.function(*inputs, **self.options)
        # torch.export knows how to flatten a plain tuple, not the named ones of torch.topk and its kind.
        return tuple(result) if isinstance(result, tuple) else result


class Values(Function):
    """Only the values of a function that gives values and indices."""

    def forward(self, *inputs: Tensor) -> Any:
        return super().forward(*inputs)[0]


class Join(nn.Module):
    """Calls a function that takes its tensors as one list: `torch.cat`, `torch.stack`."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.function = pkgutil.resolve_name(name)
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(inputs, self.dim)


class Trained(nn.Module):
    """A normalization layer of torch.nn whose affine parameters and statistics are drawn, as training would leave them.

    Fresh ones are all ones and zeros, and a normalization that ignores them would go unnoticed.
    """

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__()
        self.layer = pkgutil.resolve_name(name)(*args, **options)
        with torch.no_grad():
            for key, tensor in self.layer.state_dict().items():
                if key in ("weight", "running_var"):
                    tensor.uniform_(0.5, 1.5)
                elif key in ("bias", "running_mean"):
                    tensor.uniform_(-0.5, 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Slice(nn.Module):
    """A strided slice of the last dimension."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        super().__init__()
        self.taken = slice(start, stop, step)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.taken]


class Select(nn.Module):
    """One index of one dimension, which disappears."""

    def __init__(self, dim: int, index: int) -> None:
        super().__init__()
        self.dim, self.index = dim, index

    def forward(self, x: Tensor) -> Tensor:
        return torch.select(x, self.dim, self.index)


class Index(nn.Module):
    """Rows picked by a constant list of indices."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__()
        self.register_buffer("indices", torch.tensor(indices))

    def forward(self, x: Tensor) -> Tensor:
        return x[self.indices]


class IndexSelect(nn.Module):
    """Slices of one dimension picked by a constant list of indices."""

    def __init__(self, dim: int, indices: list[int]) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("indices", torch.tensor(indices))

    def forward(self, x: Tensor) -> Tensor:
        return torch.index_select(x, self.dim, self.indices)


class Gather(nn.Module):
    """Elements picked by indices that are an input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return torch.gather(x, self.dim, indices)


class IndexPut(nn.Module):
    """Rows of the first input replaced, at constant indices, by the second."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__()
        self.register_buffer("indices", torch.tensor(indices))

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return torch.index_put(x, [self.indices], values)


class Where(nn.Module):
    """The first input where it is the greater of the two, else the third."""

    def forward(self, x: Tensor, y: Tensor, other: Tensor) -> Tensor:
        return torch.where(x > y, x, other)


class Logical(nn.Module):
    """A logical function of one or two comparisons: each pair of inputs gives one truth value."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = pkgutil.resolve_name(name)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*(left > right for left, right in zip(inputs[::2], inputs[1::2], strict=True)))


class GridSample(nn.Module):
    """Samples the first input at the positions of the second: bilinear, zeros outside."""

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return nn.functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
