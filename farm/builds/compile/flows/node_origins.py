"""A lowered program -> the origins of its nodes, from the records of torch.export. Imports torch and executorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
from executorch.exir.lowered_backend_module import get_lowered_submodules

from farm.builds.bundles.origins import UNKNOWN, Origin, Origins
from farm.suites.suite import Case

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
        lowered = (one.original_module.graph_module.graph for _, one, _ in get_lowered_submodules(graph_module))
        self._inside = [known_origins(graph.nodes, places) for graph in lowered]
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
