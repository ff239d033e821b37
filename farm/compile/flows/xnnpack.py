"""ExecuTorch's XNNPACK flow: float32 on the processor, without any QNN. Imports torch and executorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

from farm.compile.flows.flow import Flow, Lowered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.compile.flows.flow import Example, Stopwatch
    from farm.suites.suite import Target


def _lower(
    module: torch.nn.Module,
    example: Example,
    samples: Sequence[tuple[torch.Tensor, ...]],
    target: Target,
    versions: Mapping[str, str],
    watch: Stopwatch,
) -> Lowered:
    del samples, target, versions  # nothing is calibrated, and it is the same on every SoC
    with watch.step("export"):
        exported = torch.export.export(module, example.inputs, dynamic_shapes=example.dynamic_shapes, strict=True)
    with watch.step("lower"):
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    return Lowered(edge, None, None)


FLOW: Flow = _lower
