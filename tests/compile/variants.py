"""Compiles one small module several times, some times changed in one respect, into `NAME.pte` of the current folder."""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    to_edge_transform_and_lower_to_qnn,
)

from farm.builds.bundles.key import HOST_CPU
from farm.builds.compile.flows.flow import Example, Lowering, Stopwatch
from farm.builds.compile.flows.qualcomm import FLOW
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.suites.suite import Case, Target

WEIGHTS = torch.linspace(-1.0, 1.0, 4 * 3 * 3 * 3).reshape(4, 3, 3, 3)
INPUT = torch.linspace(-2.0, 3.0, 3 * 8 * 8).reshape(1, 3, 8, 8)


class Net(torch.nn.Module):
    def __init__(self, *, step: float = 0.0, last: str = "tanh") -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)
        self.last = last
        weights = WEIGHTS.clone()
        # A weight in the middle changes, so that the range and with it the scale stays.
        weights[1, 1, 1, 1] += step
        self.conv.weight = torch.nn.Parameter(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return torch.tanh(torch.sigmoid(x)) if self.last == "tanh" else torch.sigmoid(torch.tanh(x))


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.sigmoid(x + 1.0) * 2.0)


def quantized(module: torch.nn.Module, sample: torch.Tensor = INPUT) -> bytes:
    versions, inputs = {HOST_CPU: "arm"}, (sample,)
    target = Target("SM8650", "htp", "8a8w")
    case = Case("suite", "case", "", ())
    lowering = Lowering(
        module.eval(), Example(inputs, None), [inputs], target, versions, Stopwatch(), case, folder=Path()
    )
    lowered = FLOW(lowering)
    return bytes(lowered.edge.to_executorch(lowered.config).buffer)


def two_partitions() -> bytes:
    specs = generate_qnn_executorch_compiler_spec(
        soc_model=QcomChipset.SM8850, backend_options=generate_htp_compiler_spec(use_fp16=True)
    )
    edge = to_edge_transform_and_lower_to_qnn(
        Chain().eval(), (torch.ones(1, 8),), specs, skip_node_op_set={"aten.sigmoid.default"}
    )
    return bytes(edge.to_executorch().buffer)


# The order matters: later variants have other numbers.
VARIANTS = {
    "first": lambda: quantized(Net()),
    "split": two_partitions,
    "weight": lambda: quantized(Net(step=2.5 / 255)),
    "scale": lambda: quantized(Net(), INPUT * 1.01),
    "order": lambda: quantized(Net(last="sigmoid")),
    "split_again": two_partitions,
    "again": lambda: quantized(Net()),
}

if __name__ == "__main__":
    with torch.no_grad(), less_work():
        for name, compiled in VARIANTS.items():
            Path(f"{name}.pte").write_bytes(compiled())
