"""A suite whose operator is made wrong on its way into QNN: its second convolution is the first wrong layer."""

from __future__ import annotations

from pathlib import Path

SUITE = """
[suite]
name = "wrong"
description = "Programs that go wrong where it is known."
precisions = ["8a8w", "16a8w"]

[case.broken]
module = ".models:Broken"
inputs = [{ shape = [1, 3, 4, 4] }]
precisions = ["8a8w"]
"""
# QNN gets weights of the second convolution that are half as much again as the module's.
MODELS = """
import torch
from executorch.backends.qualcomm.builders import op_conv

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.two = torch.nn.Conv2d(4, 4, 3, padding=1)
        original = op_conv.get_parameter
        def scaled(node, program):
            value = original(node, program)
            if tuple(value.shape) != tuple(self.two.weight.shape):
                return value
            return (value.float() * 1.5).clamp(-127, 127).round().to(value.dtype)
        op_conv.get_parameter = scaled
    def forward(self, x):
        return torch.relu(self.two(torch.relu(self.one(x))))
"""

FIRST_WRONG = "aten_convolution_default_1"


def write_wrong_suite(folder: Path) -> Path:
    """Write the suite into the new folder `folder`."""
    folder.mkdir()
    (folder / "suite.toml").write_text(SUITE)
    (folder / "models.py").write_text(MODELS)
    return folder
