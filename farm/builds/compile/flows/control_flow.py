"""Refusal of control flow in an exported graph, with the line of the model. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._ops import HigherOrderOperator

from farm.base.backends.registry import cpu_backends
from farm.base.errors import ConfigError
from farm.builds.compile.flows.node_origins import origin_of, source_places

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from farm.suites.suite import Case

# Operators with graphs as arguments, by the names of torch 2.13, and the functions that make them.
_FUNCTIONS = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "torch's map",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
}
_BRANCHES, _LOOPS = "compute both branches and choose one with torch.where", "write the iterations out"


def refuse_control_flow(exported: ExportedProgram, case: Case, backend: str) -> None:
    """Raise ConfigError for a graph with a branch or a loop that depends on values.

    Qualcomm's quantizer and passes of ExecuTorch 1.5 take no graph inside a graph; ExecuTorch's CPU runs branches.
    """
    for node in exported.graph_module.graph.nodes:
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        if name not in _FUNCTIONS:
            continue
        origin = origin_of(node.meta, source_places(case))
        where = ", ".join(filter(None, [f"module {origin.module}" if origin.module else "", origin.source]))
        remedy, cpu = _BRANCHES if name == "cond" else _LOOPS, " or ".join(cpu_backends())
        problem = f"{_FUNCTIONS[name]}{f' ({where})' if where else ''} is control flow, which {backend} does not take"
        raise ConfigError(case.manifest, f"case.{case.name}.module", f"{problem}: {remedy}, or run the case on {cpu}")
