"""Graphs that ExecuTorch passes to QNN while a job is compiled, and the node at work. Imports torch, executorch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from executorch.backends.qualcomm.partition.qnn_partitioner import QnnOperatorSupport, QnnPartitioner
from executorch.backends.qualcomm.qnn_preprocess import QnnBackend
from executorch.backends.qualcomm.utils.constants import QCOM_QUANT_ATTRS, QCOM_SCALE
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import ExportedProgram

from farm.builds.bundles.bundle import Origin, place_of
from farm.builds.compile.flows import qualcomm
from farm.builds.compile.flows.edge_nodes import known_origins, origin_of, source_places, visited_nodes
from farm.builds.compile.flows.shortcuts.tried import replaced
from farm.suites.suite import Case

# A float32 below this bound has no finite reciprocal; QNN refuses such a scale.
_TINY = torch.finfo(torch.float32).tiny
_MOST_NAMED = 3
# Prefix of quantize and dequantize nodes, whose arguments are the scales of other nodes.
_CODES = "quantized_decomposed_"


class GraphWatch:
    """Watcher of the graphs of one job."""

    def __init__(self, case: Case, note: Callable[[str], None]) -> None:
        """Take `note`, which gets every node offered to QNN, with its place."""
        self._places = source_places(case)
        self._note = note
        # Weak references do not keep the weights of a large model alive.
        self._programs: list[weakref.ref[ExportedProgram]] = []
        self._prepared: list[weakref.ref[torch.fx.GraphModule]] = []
        self._by_name: dict[str, torch.fx.Node] = {}
        self.origins: dict[str, Origin] = {}
        """Origins of the nodes of the graphs at the time of the failure, by name."""
        self.odd_values: list[str] = []
        """Descriptions of a few constants and scales in the graphs that are infinite, NaN or too small for QNN."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body compiles; an exception from the body still holds its graphs, which are read then.

        An ExecuTorch with other names of these methods is not watched.
        """
        with ExitStack() as stack:
            for owner, name, look in (
                (QnnBackend, "_build_op_wrappers", self._add),
                (QnnPartitioner, "partition", lambda _, program: self._add(program)),
                (QnnOperatorSupport, "is_node_supported", lambda _, __, node: self._at(node)),
                (qualcomm, "convert_pt2e", self._calibrated),
            ):
                stack.enter_context(replaced(owner, name, partial(_with_look, look)))
            stack.enter_context(visited_nodes(self._visited))
            try:
                yield
            except Exception:
                self._record_odd_values()
                raise
            finally:
                self._by_name = {}

    def _record_odd_values(self) -> None:
        programs = [program for one in self._programs if (program := one()) is not None]
        for program in programs:
            self.origins |= known_origins(program.graph_module.graph.nodes, self._places)
        self.odd_values = (self._odd_in_graphs(programs) or self._odd_observations())[:_MOST_NAMED]

    def _odd_in_graphs(self, programs: Sequence[ExportedProgram]) -> list[str]:
        """Return the odd constants, arguments and scales in the graphs, without scales that follow from an odd one."""
        found = dict[str, None]()
        for program in programs:
            for name, tensor in {**program.state_dict, **program.constants}.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                    found[f"the constant {name} holds {_odd_in(tensor)}"] = None
            for node in program.graph_module.graph.nodes:
                if not isinstance(node.target, EdgeOpOverload) or node.name.startswith(_CODES):
                    continue
                scale = _odd_scale(node)
                if (filled := _odd_argument(node)) is not None:
                    found[f"{node.name} is made of {filled}{self._place(node)}"] = None
                elif scale is not None and not any(_odd_scale(one) for one in node.all_input_nodes):
                    found[f"the scale of {node.name} is {scale}{self._place(node)}"] = None
        return list(found)

    def _odd_observations(self) -> list[str]:
        """Return the values that were infinite or NaN while the module was calibrated."""
        found = []
        for graph in (graph for one in self._prepared if (graph := one()) is not None):
            for node in graph.graph.nodes:
                observer = getattr(graph, str(node.target), None) if node.op == "call_module" else None
                seen = [getattr(observer, name, None) for name in ("min_val", "max_val")]
                odd = [one for one in seen if isinstance(one, torch.Tensor) and not one.isfinite().all()]
                # An observer without a value holds two infinities.
                if odd and not (len(odd) == 2 and torch.isinf(odd[0]).all() and torch.isinf(odd[1]).all()):
                    given = node.args[0]
                    found.append(f"{given.name} is {_odd_in(odd[0])}{self._place(given)}")
        return found

    def _calibrated(self, prepared: torch.fx.GraphModule, *_: Any, **__: Any) -> None:
        self._prepared.append(weakref.ref(prepared))

    def _add(self, program: ExportedProgram, *_: Any, **__: Any) -> None:
        if not any(program is one() for one in self._programs):
            self._programs.append(weakref.ref(program))
        self._by_name = {node.name: node for node in program.graph_module.graph.nodes}

    def _visited(self, name: str, _: str) -> None:
        # Nodes that passes of the backend add come from no line of the model.
        self._at(self._by_name[name]) if name in self._by_name else self._note(name)

    def _at(self, node: torch.fx.Node) -> None:
        if node.op == "call_function":
            self._note(f"{node.name}{self._place(node)}")

    def _place(self, node: torch.fx.Node) -> str:
        return place_of(origin_of(node, self._places))


def _with_look(look: Callable[..., None], called: Callable[..., Any]) -> Callable[..., Any]:
    """Return `called` with a call of `look`, with the same arguments, before each call of it."""

    def with_look(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return called(*args, **kwargs)

    return with_look


def _odd_argument(node: torch.fx.Node) -> float | None:
    """Return the first argument of a node that is infinite or NaN."""
    numbers = (one for one in node.args if isinstance(one, float) and not math.isfinite(one))
    return next(numbers, None) if node.op == "call_function" else None


def _odd_scale(node: torch.fx.Node) -> float | None:
    """Return the scale of a node's output if QNN cannot take it, else None."""
    scale = (node.meta.get(QCOM_QUANT_ATTRS) or {}).get(QCOM_SCALE)
    is_odd = isinstance(scale, float) and (not math.isfinite(scale) or abs(scale) < _TINY)
    return scale if is_odd else None


def _odd_in(tensor: torch.Tensor) -> str:
    flat = tensor.flatten()
    return str(flat[~flat.isfinite()][0].item())
