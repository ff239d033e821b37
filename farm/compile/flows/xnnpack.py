"""ExecuTorch's XNNPACK flow: float32 on the processor, without any QNN. Imports torch and executorch."""

from __future__ import annotations

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

from farm.compile.flows.flow import Flow, Lowered, Lowering


def _lower(lowering: Lowering) -> Lowered:
    exported = lowering.export()
    with lowering.watch.step("lower"):
        # A baseline of what the case executes: its other methods are left out.
        programs = {lowering.method: exported}
        edge = to_edge_transform_and_lower(programs, partitioner={lowering.method: [XnnpackPartitioner()]})
    # Nothing is quantized, and it is the same on every SoC.
    return Lowered(edge, None, None, exported)


FLOW: Flow = _lower
