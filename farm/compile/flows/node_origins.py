"""A lowered program -> where its nodes come from, by what torch.export notes of each. Imports torch and executorch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farm.bundles.origins import UNKNOWN, Origin, Origins

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager

_METHOD = "forward"
_CALL = "executorch_call_delegate"
# torch.export calls a module that is called again `layers.3@1`.
_AGAIN = re.compile(r"@\d+$")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_TORCH = Path(torch.__file__).parent


def node_origins(edge: EdgeProgramManager, program: ExecutorchProgramManager, suites: Path) -> Origins:
    """Return where the nodes inside of delegates, and those that no delegate took, come from.

    `edge` is what `program` was made of; paths of sources below the folder `suites` are relative to it.
    """
    places = [suites, *(Path(entry) for entry in sys.path if entry)]
    graph_module = edge.exported_program().graph_module
    lowered = [
        getattr(graph_module, node.args[0].target) for node in graph_module.graph.nodes if _name_of(node) == _CALL
    ]
    called = sorted(program.delegate_map.get(_METHOD) or {})
    calls = {}
    # One that is missing would give its nodes to another.
    if len(called) == len(lowered):
        for instruction, module in zip(called, lowered, strict=True):
            calls[instruction] = _origins_of(module.original_module.graph_module.graph.nodes, places)
    return Origins(calls, _kernels(program, set(called), places))


def _kernels(program: ExecutorchProgramManager, called: set[int], places: Sequence[Path]) -> dict[int, Origin]:
    nodes = program.exported_program().graph_module.graph.nodes
    by_handle = {node.meta.get("debug_handle"): node for node in nodes if node.op == "call_function"}
    found = {}
    for instruction, handle in (program.debug_handle_map.get(_METHOD) or {}).items():
        if instruction in called or not isinstance(handle, int) or handle not in by_handle:
            continue
        origin = _origin(by_handle[handle].meta, places)
        if origin != UNKNOWN:
            found[int(instruction)] = origin
    return found


def _origins_of(nodes: Iterable[torch.fx.Node], places: Sequence[Path]) -> dict[str, Origin]:
    origins = {node.name: _origin(node.meta, places) for node in nodes if node.op == "call_function"}
    return {name: origin for name, origin in origins.items() if origin != UNKNOWN}


def _origin(meta: Mapping[str, Any], places: Sequence[Path]) -> Origin:
    stack = [path for path, _ in (meta.get("nn_module_stack") or {}).values()]
    module = _AGAIN.sub("", str(stack[-1])) if stack else ""
    frames = [(Path(file), line) for file, line in _FRAME.findall(meta.get("stack_trace") or "")]
    source = next((f"{_relative(file, places)}:{line}" for file, line in reversed(frames) if _is_of_model(file)), "")
    return Origin(module, source)


def _is_of_model(file: Path) -> bool:
    # What torch generates while it traces is `<eval_with_key>.994`, another number each time.
    return file.is_absolute() and not file.is_relative_to(_TORCH)


def _relative(file: Path, places: Sequence[Path]) -> str:
    """Return a path from the nearest of `places`: the same on every machine."""
    above = [place for place in places if file.is_relative_to(place)]
    return str(file.relative_to(max(above, key=lambda place: len(place.parts)))) if above else file.name


def _name_of(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
