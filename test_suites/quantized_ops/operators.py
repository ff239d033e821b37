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


class Chain(nn.Sequential):
    """Layers of torch.nn one after another: the full name of each, then the list of its arguments."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(
            *(pkgutil.resolve_name(name)(*args) for name, args in zip(parts[::2], parts[1::2], strict=True))
        )


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
    """Rows of the first input replaced, at constant indices, by the second; or the second added to them."""

    def __init__(self, indices: list[int], accumulate: bool = False) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.register_buffer("indices", torch.tensor(indices))

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return torch.index_put(x, [self.indices], values, self.accumulate)


class Cache(nn.Module):
    """Rows of a buffer that outlives the inference replaced, at indices that are an input: a KV cache."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(rows, columns))

    def forward(self, indices: Tensor, values: Tensor) -> Tensor:
        self.cache.index_copy_(0, indices, values)
        # The buffer itself is no output: it stays where it is.
        return self.cache + 0


class SliceScatter(nn.Module):
    """A strided slice of one dimension of the first input replaced by the second."""

    def __init__(self, dim: int, start: int, stop: int, step: int) -> None:
        super().__init__()
        self.place = {"dim": dim, "start": start, "end": stop, "step": step}

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return torch.slice_scatter(x, values, **self.place)


class Copy(nn.Module):
    """The input copied over a constant of more rows; the additions quantize both sides, as a copy has no rule."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        target = torch.zeros(self.rows, *x.shape[1:])
        return torch.ops.aten.copy.default(target, x + 1.0) + 1.0


class AddArange(nn.Module):
    """The input plus an arithmetic sequence."""

    def __init__(self, start: float, stop: float, step: float) -> None:
        super().__init__()
        self.sequence = start, stop, step

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(*self.sequence, dtype=torch.float32)


class AddFilled(nn.Module):
    """Adds a tensor of the shape of its input that is filled with one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ops.aten.fill.Scalar(x, self.value)


class Drawn(nn.Module):
    """The input where as many numbers, drawn on the device, lie below a bound; its negative where they do not."""

    def __init__(self, name: str, below: float) -> None:
        super().__init__()
        self.function = pkgutil.resolve_name(name)
        self.below = below

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.function(x) < self.below, x, -x)


class Cast(nn.Module):
    """The input as another type, given by its name."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Otherwise(nn.Module):
    """The input where it is positive, else a constant."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.value)


class Centered(nn.Module):
    """The input less its mean, which is a tensor without dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.mean(x)


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
    """Samples the first input at the positions of the second."""

    def __init__(self, mode: str = "bilinear", padding: str = "zeros") -> None:
        super().__init__()
        self.mode, self.padding = mode, padding

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return nn.functional.grid_sample(x, grid, mode=self.mode, padding_mode=self.padding, align_corners=False)
