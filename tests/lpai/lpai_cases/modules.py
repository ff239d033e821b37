"""The stub does not know GELU, nor PReLU, which has weights."""

import torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.conv(x)))


class Split(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.gelu(torch.relu(x)) + x)


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.PReLU(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.slope(torch.relu(x)))
