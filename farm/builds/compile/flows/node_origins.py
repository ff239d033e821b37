"""A lowered program -> the origins of its nodes, from the records of torch.export. Imports torch and executorch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farm.builds.bundles.origins import UNKNOWN, Origin, Origins

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from executorch.exir import EdgeProgramManager, ExecutorchProgramManager

    from farm.suites.suite import Case

_CALL = "executorch_call_delegate"
# torch.export calls a module that is called again `layers.3@1`.
_AGAIN = re.compile(r"@\d+$")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_TORCH = Path(torch.__file__).parent


class EdgeOrigins:
    """Origins of the nodes of a lowered program. Serializing changes the handles, so that this is created before it."""

    def __init__(self, edge: EdgeProgramManager, suites: Path, method: str) -> None:
        """Read the origins of `method`. Paths of sources below the folder `suites` are relative to it."""
        self._method = method
        places = [suites, *(Path(entry) for entry in sys.path if entry)]
        graph_module = edge.exported_program(method).graph_module
        nodes = graph_module.graph.nodes
        lowered = [getattr(graph_module, node.args[0].target) for node in nodes if _name_of(node) == _CALL]
        self._inside = [_origins_of(one.original_module.graph_module.graph.nodes, places) for one in lowered]
        self._by_handle = {node.meta.get("debug_handle"): origin_of(node.meta, places) for node in nodes}

    def of(self, program: ExecutorchProgramManager) -> Origins:
        """Return the origins by the instructions of the serialized `program`."""
        called = sorted(program.delegate_map.get(self._method) or {})
        # With a missing call, the nodes of a delegate would be assigned to another call.
        calls = dict(zip(called, self._inside, strict=True)) if len(called) == len(self._inside) else {}
        # The entry of a delegate's call holds the handles of all its nodes, and is left out.
        handles = {
            at: one for at, one in (program.debug_handle_map.get(self._method) or {}).items() if at not in called
        }
        kernels = {at: self._by_handle.get(handle, UNKNOWN) for at, handle in handles.items() if type(handle) is int}
        return Origins(calls, {at: origin for at, origin in kernels.items() if origin != UNKNOWN})


def source_places(case: Case) -> list[Path]:
    """Return the folders that sources of a case are relative to."""
    return [Path(case.folder).parent, *(Path(entry) for entry in sys.path if entry)]


def _origins_of(nodes: Iterable[torch.fx.Node], places: Sequence[Path]) -> dict[str, Origin]:
    origins = {node.name: origin_of(node.meta, places) for node in nodes if node.op == "call_function"}
    return {name: origin for name, origin in origins.items() if origin != UNKNOWN}


def origin_of(meta: Mapping[str, Any], places: Sequence[Path]) -> Origin:
    """Return the origin of a node with this `meta`; its source is relative to the nearest of `places`."""
    stack = [path for path, _ in (meta.get("nn_module_stack") or {}).values()]
    module = _AGAIN.sub("", str(stack[-1])) if stack else ""
    frames = [(Path(file), line) for file, line in _FRAME.findall(meta.get("stack_trace") or "")]
    source = next((f"{_relative(file, places)}:{line}" for file, line in reversed(frames) if _is_of_model(file)), "")
    return Origin(module, source)


def _is_of_model(file: Path) -> bool:
    # Code that torch generates while it traces is in `<eval_with_key>.994`, with another number each time.
    return file.is_absolute() and not file.is_relative_to(_TORCH)


def _relative(file: Path, places: Sequence[Path]) -> str:
    """Return a path from the nearest of `places`: the same on every machine."""
    above = [place for place in places if file.is_relative_to(place)]
    return str(file.relative_to(max(above, key=lambda place: len(place.parts)))) if above else file.name


def _name_of(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
