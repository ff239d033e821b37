"""Modules that are difficult to compile, run or judge: writes in place, aliases, nested outputs, constants, NaN."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class InputSlice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        return x.relu() + x


class InputAdd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return x * 2.0


class InputReturned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class SecondInput(nn.Module):
    """Writes to an input that the output does not depend on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y.copy_(x * 2)
        return x.relu()


class InputThroughView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.view(2, 4)[0].zero_()
        return x.tanh() + x


class BufferSum(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total * 2.0


class BufferReturned(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x * 2)
        return self.last


class BufferReplaced(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.last
        self.last = x * 2
        return y


class Counter(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.relu()


class Intermediate(nn.Module):
    """Writes in place to a tensor of its own, of which another output is a view."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        z = y.view(8)
        y.add_(1.0)
        return y, z * 2


class ParameterWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.mul_(2.0)
        return x * self.weight


class ViewOfInput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(8), x.tanh()


class InputAsOutput(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        return y, y


class TwoViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        return y.view(2, 4), y[:, ::2]


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x.relu(), "aux": x.tanh()}


class Nested(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x.relu(), [x.tanh(), x.sigmoid()]


class Scores(NamedTuple):
    boxes: Tensor
    levels: dict[str, Tensor]


class Fields(nn.Module):
    def forward(self, x: Tensor) -> Scores:
        return Scores(x.relu(), {"p3": x.tanh(), "p4": x.sigmoid()})


class WithNone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.relu(), None


class WithNumber(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x.relu(), x.shape[1]


class ConstantBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), torch.full((1, 4), 8.0)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().transpose(1, 2)


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2.0)[:, 1::2]


class Expanded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().unsqueeze(1).expand(1, 3, 8)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ChannelsLastOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to(memory_format=torch.channels_last)


class Indices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class Greatest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(dim=1)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().mean()


class ScalarInput(nn.Module):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor


class Undefined(nn.Module):
    """Has NaN wherever its input is negative, as the operator demands."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Empty(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), x[:, :0]
