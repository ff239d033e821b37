"""ExecuTorch's XNNPACK flow: float32 on the processor, without any QNN. Imports torch and executorch."""

from __future__ import annotations

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch.export import ExportedProgram

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.builds.compile.flows.flow import Flow, Lowered, Lowering
from farm.suites.suite import Case


def _lower(lowering: Lowering) -> Lowered:
    exported = lowering.export()
    _require_c_order(exported, lowering.case)
    with lowering.watch.step("lower"):
        # The program is a CPU baseline of the executed method, without the other methods of the case.
        programs = {lowering.method: exported}
        edge = to_edge_transform_and_lower(programs, partitioner={lowering.method: [XnnpackPartitioner()]})
    # The program has no quantized module, and is the same on every SoC.
    return Lowered(edge, None, None, exported)


FLOW: Flow = _lower


def _require_c_order(exported: ExportedProgram, case: Case) -> None:
    """Raise ConfigError for a convolution whose weights lie in channels-last order: ExecuTorch 1.5 asserts C order."""
    parameters = exported.graph_signature.inputs_to_parameters
    for node in exported.graph.nodes:
        if node.name not in parameters or not any("conv" in str(user.target) for user in node.users):
            continue
        weights = node.meta["val"]
        if weights.dim() == 4 and not weights.is_contiguous():
            problem = f"XNNPACK takes weights of convolutions in C order, and {parameters[node.name]} is channels last"
            remedy = f"leave .to(memory_format=...) out of the module, or run the case on {DEFAULT_BACKEND}"
            raise case.error("module", f"{problem}: {remedy}")
