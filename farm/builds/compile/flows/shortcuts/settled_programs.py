"""Decompositions that would change nothing. Imports torch.

ExecuTorch decomposes a program three times: without a table, with a table that spares the backend's operators, and with
the whole table while these operators have other names. torch traces the whole graph each time, a tenth of the time of
compiling an operator. The second and third trace of most programs of operators and models return the same graph.

Tried with torch 2.13 (ExecuTorch 1.5.1); another version is not changed.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.decomp_utils import CustomDecompTable
from torch.export.graph_signature import OutputKind
from torch.fx.graph import _Namespace

from farm.builds.compile.flows.shortcuts.tried import has_parameters, is_tried

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TRANSFORMED = "EDGE_DO_NOT_DECOMP"
"""Namespace of ExecuTorch for operators that it spares, with the names and kernels of theirs in `aten`."""


class _Settled(NamedTuple):
    """Graph of a program as torch returned it from a decomposition."""

    nodes: tuple[tuple[Any, ...], ...]


@contextmanager
def settled_programs() -> Iterator[None]:
    """Let a program that comes from a decomposition be its own decomposition, if another trace cannot change it.

    A program is taken for its decomposition without operators of the table and nested graphs, while its nodes are
    unchanged since the decomposition, and if a trace would give them the same names.
    """
    decompose = ExportedProgram.run_decompositions
    if not is_tried() or not has_parameters(decompose, "self", "decomp_table", "decompose_custom_triton_ops"):
        yield
        return
    settled: WeakKeyDictionary[Any, _Settled] = WeakKeyDictionary()

    def decompose_once(program: Any, decomp_table: Any = None, decompose_custom_triton_ops: bool = False) -> Any:
        if decomp_table is not None and not decompose_custom_triton_ops:
            before = settled.get(program)
            if before is not None and before == _read(program) and _is_free_of(program, decomp_table):
                return program
        found = decompose(program, decomp_table, decompose_custom_triton_ops)
        if _is_plain(found):
            settled[found] = _read(found)
        return found

    with patch.object(ExportedProgram, "run_decompositions", decompose_once):
        yield


def _read(program: Any) -> _Settled:
    return _Settled(
        tuple((node, node.name, node.op, _own(node.target), node.args, node.kwargs) for node in program.graph.nodes)
    )


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
        if node.op == "call_function":
            if node.target is operator.getitem:
                base = "getitem"
            elif isinstance(node.target, OpOverload):
                base = node.target.overloadpacket.__name__
            else:
                return False
            if names.create_name(base, None) != node.name:
                return False
        elif node.op not in ("placeholder", "output"):
            return False
    return True
