"""Decompositions of programs that are decomposed already, which are left out. Imports torch.

ExecuTorch decomposes a program three times: without a table, with a table without operators that the backend keeps,
and with the whole table while these operators have other names. torch traces the whole graph each time, a tenth of the
time of compiling an operator. The second and third trace of most programs return the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.decomp_utils import CustomDecompTable
from torch.export.graph_signature import OutputKind
from torch.fx.graph import _Namespace

from farm.builds.compile.flows.shortcuts.tried import replaced

_TRANSFORMED = "EDGE_DO_NOT_DECOMP"
"""Namespace of ExecuTorch for operators that it keeps, with the names and kernels of `aten`."""


def settled_programs() -> AbstractContextManager[None]:
    """Return decomposed programs unchanged from a further decomposition while the body runs, if it cannot change them.

    This holds for a program without operators of the table and without nested graphs, whose nodes are unchanged since
    its decomposition and would get the same names from a trace.
    """
    settled: WeakKeyDictionary[Any, list[tuple[Any, ...]]] = WeakKeyDictionary()
    """Nodes of programs as torch returned them from a decomposition."""

    def once(decompose: Callable[..., Any]) -> Callable[..., Any]:
        def decompose_once(program: Any, decomp_table: Any = None, decompose_custom_triton_ops: bool = False) -> Any:
            if decomp_table is not None and not decompose_custom_triton_ops:
                is_settled = program in settled and settled[program] == _nodes(program)
                if is_settled and _is_free_of(program, decomp_table):
                    return program
            found = decompose(program, decomp_table, decompose_custom_triton_ops)
            if _is_plain(found):
                settled[found] = _nodes(found)
            return found

        return decompose_once

    return replaced(ExportedProgram, "run_decompositions", once, tried_only=True)


def _nodes(program: Any) -> list[tuple[Any, ...]]:
    return [(node, node.name, node.op, _own(node.target), node.args, node.kwargs) for node in program.graph.nodes]


def _own(target: Any) -> Any:
    """Return the name in place of an operator, as ExecuTorch replaces operators by their transformed ones."""
    if isinstance(target, OpOverload) and target.namespace in (_TRANSFORMED, "aten"):
        return target._schema.name.rpartition("::")[2], target._overloadname  # noqa: SLF001 - torch has no public name
    return target


def _is_free_of(program: Any, table: Mapping[Any, Any]) -> bool:
    if isinstance(table, CustomDecompTable):
        table = table.materialize()
    return not any(node.target in table for node in program.graph.nodes if node.op == "call_function")


def _is_plain(program: Any) -> bool:
    """Return whether a trace of the graph would return equal nodes with equal names."""
    signature = program.graph_signature
    # A write to an input or buffer is an output of its own kind, whose next trace fails or changes the graph.
    is_written = any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs)
    if is_written or signature.backward_signature is not None:
        return False
    names = _Namespace()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_known = node.target is operator.getitem or isinstance(node.target, OpOverload)
        if node.op != "call_function" or not is_known:
            return False
        base = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
        if names.create_name(base.__name__, None) != node.name:
            return False
    return True
