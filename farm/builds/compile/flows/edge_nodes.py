"""Nodes of a lowered graph: their origins in the model, and their delegation. Imports torch and executorch."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import get_lowered_submodules

from farm.builds.bundles.bundle import UNKNOWN, Origin, Origins
from farm.suites.suite import Case

# A lowered program -> the origins of its nodes, from the records of torch.export.


# torch.export calls a module that is called again `layers.3@1`.
_AGAIN = re.compile(r"@\d+$")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_TORCH = Path(torch.__file__).parent


class EdgeOrigins:
    """Origins of the nodes of a lowered program. Serializing changes the handles, so that this is created before it."""

    def __init__(self, edge: EdgeProgramManager, case: Case, method: str) -> None:
        self._method = method
        places = source_places(case)
        graph_module = edge.exported_program(method).graph_module
        self._inside = [known_origins(graph.nodes, places) for graph in delegated_graphs(graph_module)]
        self._by_handle = {node.meta.get("debug_handle"): origin_of(node, places) for node in graph_module.graph.nodes}

    def of(self, program: ExecutorchProgramManager) -> Origins:
        """Return the origins by the instructions of the serialized `program`."""
        called = sorted(program.delegate_map.get(self._method) or {})
        # With a missing call, the nodes of a delegate would be assigned to another call.
        calls = dict(zip(called, self._inside, strict=True)) if len(called) == len(self._inside) else {}
        # The entry of a delegate's call holds the handles of all its nodes, and is left out.
        handles = program.debug_handle_map.get(self._method) or {}
        kernels = {
            at: self._by_handle.get(handle, UNKNOWN)
            for at, handle in handles.items()
            if at not in called and type(handle) is int
        }
        return Origins(calls, {at: origin for at, origin in kernels.items() if origin != UNKNOWN})


def source_places(case: Case) -> list[Path]:
    """Return the folders that sources of a case are relative to."""
    return [Path(case.folder).parent, *(Path(entry) for entry in sys.path if entry)]


def known_origins(nodes: Iterable[torch.fx.Node], places: Sequence[Path]) -> dict[str, Origin]:
    """Return the known origins of the operators among `nodes`, by the names of the nodes."""
    origins = {node.name: origin_of(node, places) for node in nodes if node.op == "call_function"}
    return {name: origin for name, origin in origins.items() if origin != UNKNOWN}


def origin_of(node: torch.fx.Node, places: Sequence[Path]) -> Origin:
    """Return the origin of a node; its source is relative to the nearest of `places`."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    module = _AGAIN.sub("", str(stack[-1])) if stack else ""
    frames = [(Path(file), line) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    source = next((f"{_relative(file, places)}:{line}" for file, line in reversed(frames) if _is_of_model(file)), "")
    return Origin(module, source)


def _is_of_model(file: Path) -> bool:
    # Code that torch generates while it traces is in `<eval_with_key>.994`, with another number each time.
    return file.is_absolute() and not file.is_relative_to(_TORCH)


def _relative(file: Path, places: Sequence[Path]) -> str:
    """Return a path from the nearest of `places`: the same on every machine."""
    above = [place for place in places if file.is_relative_to(place)]
    return str(file.relative_to(max(above, key=lambda place: len(place.parts)))) if above else file.name


# Delegated and remaining operators of a lowered graph.


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
    delegated = delegated_graphs(graph_module)
    inside = sum(node.op == "call_function" for graph in delegated for node in graph.nodes)
    called = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    on_cpu = [target for target in called if getattr(target, "__name__", "") not in (_CALL, "getitem")]
    # The text of an edge operator would be its whole schema.
    names = (one.__name__ if isinstance(one, EdgeOpOverload) else str(one) for one in on_cpu)
    return Delegation(len(delegated), inside, dict(Counter(names)))


def delegated_graphs(graph_module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    """Return the graphs of the delegates of a lowered edge graph."""
    return [one.original_module.graph_module.graph for _, one, _ in get_lowered_submodules(graph_module)]


def misread_codes(graph_module: torch.fx.GraphModule) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the types, on the CPU and in QNN, of codes that pass a delegate's edge in different sizes; else None.

    `graph_module` is a lowered edge graph. ExecuTorch 1.5 passes the buffer of one side to the other unchanged.
    """
    from executorch.backends.qualcomm.builders.utils import deduce_dtype

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
    with visited_nodes(lambda _, operator: built.update([operator])):
        yield built


def visited_nodes(visit: Callable[[str, str], None]) -> AbstractContextManager[None]:
    """Call `visit` with name and operator of each node that ExecuTorch builds for QNN while the body runs."""

    def listen(message: str) -> None:
        _, start, visited = message.partition(_VISITING)
        if start:
            name, _, operator = visited.rpartition(", ")
            visit(name, operator)

    return _listening(_BUILDING, listen)


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
