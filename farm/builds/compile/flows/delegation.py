"""Delegated and remaining operators of a lowered graph. Imports torch and executorch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import get_lowered_submodules

_CALL = "executorch_call_delegate"
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"

# Logger of ExecuTorch 1.5 (QnnOperatorSupport) with a verdict on every operator: whether the backend takes it.
_VERDICTS = "executorch.backends.qualcomm.partition.qnn_partitioner"
_PHASE = "[LpaiPartitionFallbackSupport] "
_TAKEN = ("True", "Forced Passed")

# Logger of ExecuTorch 1.5 (QnnBackend) with every node built for QNN: "Visiting: aten_add_tensor, aten.add.Tensor".
_BUILDING = "executorch.backends.qualcomm.qnn_preprocess"
_VISITING = "Visiting: "


class Delegation(NamedTuple):
    """Places of a graph's operators: in delegates or on the CPU."""

    partitions: int
    """Calls of delegates."""
    delegated_ops: int
    """Nodes inside of delegates."""
    cpu_ops: dict[str, int]
    """Operators on the CPU, and how often."""


def read_delegation(graph_module: torch.fx.GraphModule) -> Delegation:
    """Return the delegation of a lowered edge graph. Pure."""
    lowered = [one.original_module.graph_module.graph for _, one, _ in get_lowered_submodules(graph_module)]
    inside = sum(node.op == "call_function" for graph in lowered for node in graph.nodes)
    called = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    on_cpu = [target for target in called if getattr(target, "__name__", "") not in (_CALL, "getitem")]
    # The text of an edge operator would be its whole schema.
    names = (one.__name__ if isinstance(one, EdgeOpOverload) else str(one) for one in on_cpu)
    return Delegation(len(lowered), inside, dict(Counter(names)))


def misread_codes(graph_module: torch.fx.GraphModule) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the types, on the CPU and in QNN, of codes that pass a delegate's edge in different sizes; else None.

    `graph_module` is a lowered edge graph. ExecuTorch 1.5 passes the buffer of one side to the other unchanged.
    """
    try:
        from executorch.backends.qualcomm.builders.utils import deduce_dtype
    except ImportError:  # in another ExecuTorch, which may convert the codes
        return None
    for node in graph_module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        # A delegate returns all outputs as one value, and `getitem` picks each of them.
        near = node.users if name == _QUANTIZE else (*_producers(node),)
        if name not in (_QUANTIZE, _DEQUANTIZE) or not any(_is_call(one) for one in near):
            continue
        least, greatest, on_cpu = node.args[3:6]
        in_qnn = deduce_dtype(None, {"quant_min": least, "quant_max": greatest, "dtype": on_cpu})
        if in_qnn.itemsize != on_cpu.itemsize:
            return on_cpu, in_qnn
    return None


@contextmanager
def built_operators() -> Iterator[Counter[str]]:
    """Yield a counter that fills with the operators of the graphs for QNN while the body lowers a module.

    Names are the targets of ExecuTorch's op builders. The delegates of a lowered program contain other operators, as
    passes of the backend come between.
    """
    built: Counter[str] = Counter()

    def count(_: str, operator: str) -> None:
        built[operator] += 1

    with visited_nodes(count):
        yield built


@contextmanager
def visited_nodes(visit: Callable[[str, str], None]) -> Iterator[None]:
    """Call `visit` with name and operator of each node that ExecuTorch builds for QNN while the body runs."""

    def listen(message: str) -> None:
        _, start, visited = message.partition(_VISITING)
        if start:
            name, _, operator = visited.rpartition(", ")
            visit(name, operator)

    with _listening(_BUILDING, listen):
        yield


@contextmanager
def refused_operators() -> Iterator[Counter[str]]:
    """Yield a counter that fills with the operators that LPAI refuses while the body lowers a graph.

    Lowering itself may fail because of them: ExecuTorch 1.5 leaves no operator with weights to the CPU.
    """
    refused: Counter[str] = Counter()

    def listen(message: str) -> None:
        name, bar, verdict = message.removeprefix(_PHASE).partition(" | ")
        if message.startswith(_PHASE) and bar and verdict not in _TAKEN:
            refused[name] += 1

    with _listening(_VERDICTS, listen):
        yield refused


@contextmanager
def _listening(logger_name: str, listen: Callable[[str], None]) -> Iterator[None]:
    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            listen(record.getMessage())

    logger, listener = logging.getLogger(logger_name), Listener()
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)


def _is_call(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == _CALL


def _producers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes that compute the inputs of `node`; for an output picked by `getitem`, its operator as well."""
    for given in node.all_input_nodes:
        yield from (given, *given.all_input_nodes) if getattr(given.target, "__name__", "") == "getitem" else (given,)
