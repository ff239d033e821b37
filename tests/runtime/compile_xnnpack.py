"""Run as a program: compiles a model for XNNPACK into a folder, with two inputs and what eager torch makes of them.

conv.pte   float32[1,3,8,8] -> float32[1,4]: convolution, relu, mean, linear in XNNPACK; x{0,1}.raw, y{0,1}.raw
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    module = Model().eval()
    samples = [torch.randn(1, 3, 8, 8) for _ in range(2)]
    program = to_edge_transform_and_lower(
        torch.export.export(module, (samples[0],)), partitioner=[XnnpackPartitioner()]
    )
    calls = [node.target for node in program.exported_program().graph.nodes if node.op == "call_function"]
    assert any("executorch_call_delegate" in str(call) for call in calls), calls
    (folder / "conv.pte").write_bytes(program.to_executorch().buffer)
    with torch.no_grad():
        for i, sample in enumerate(samples):
            sample.numpy().tofile(folder / f"x{i}.raw")
            module(sample).numpy().tofile(folder / f"y{i}.raw")
