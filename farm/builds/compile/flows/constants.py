"""Outputs that do not depend on the inputs, by the exported graph. Imports torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from farm.builds.bundles.bundle import Constant, TensorSpec
from farm.builds.compile.flows.reference import Tensors, equal, returned_nodes, writes_in_place

_CONSTANT_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Operators that read the shape and type of their first argument, and none of its elements.
_SHAPE_ALONE = frozenset(
    {
        "copy", "fill", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "sym_numel", "sym_size",
        "sym_storage_offset", "sym_stride", "zero", "zeros_like",
    }
)  # fmt: skip
# Operators that make or move elements and compute none. Views are known by their schema.
_MOVES = frozenset(
    {
        "_to_copy", "arange", "as_strided_scatter", "cat", "clone", "constant_pad_nd", "expand_copy", "eye", "flip",
        "full", "gather", "index", "index_put", "index_select", "lift_fresh_copy", "masked_fill", "ones",
        "permute_copy", "repeat", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "stack", "to", "tril",
        "triu", "where", "zeros", *_SHAPE_ALONE,
    }
)  # fmt: skip


class _Source(IntEnum):
    """Origin of the elements of a value; of several, the greatest counts."""

    LITERAL = 0
    """Constants as they are, moved at most."""
    COMPUTED = 1
    """Constants that operators computed from others."""
    INPUT = 2
    """Inputs, buffers that the module writes to, or random numbers."""


_CONSTANTS = {_Source.LITERAL: Constant.LITERAL, _Source.COMPUTED: Constant.COMPUTED, _Source.INPUT: Constant.NONE}


def mark_constants(specs: Sequence[TensorSpec], exported: ExportedProgram) -> tuple[TensorSpec, ...]:
    """Return `specs`, the outputs of the program of `exported`, with marks on outputs that are constant by its graph.

    The graph is functional. Inputs that the program writes to stay as they are.
    """
    found = iter(constant_outputs(exported))
    return tuple(
        spec if spec.written else msgspec.structs.replace(spec, constant=next(found, Constant.NONE)) for spec in specs
    )


def mark_ready_constants(
    specs: Sequence[TensorSpec], references: Sequence[Tensors], export: Callable[[], ExportedProgram]
) -> list[TensorSpec]:
    """Return `specs`, the outputs of a ready program, marked by the graph of the module of its references.

    The module is exported only if an output has a single value in all `references`, and cannot be judged otherwise.
    """
    if not any(_has_one_value(outputs) for outputs in zip(*references, strict=True)):
        return list(specs)
    try:
        exported = export()
    except Exception:  # noqa: BLE001 - a module for references alone need not be one that torch can export
        return list(specs)
    return list(mark_constants(specs, exported))


def _has_one_value(tensors: Sequence[torch.Tensor]) -> bool:
    elements = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return not elements.numel() or equal(elements, elements[:1].expand_as(elements))


def constant_outputs(exported: ExportedProgram) -> tuple[Constant, ...]:
    """Return the kind of constant of each output of a functional module; NONE for an output that depends on inputs."""
    signature = exported.graph_signature
    written = set(signature.buffers_to_mutate.values())
    # A written buffer holds the values of the previous call.
    constant = {
        spec.arg.name for spec in signature.input_specs if spec.kind in _CONSTANT_INPUTS and spec.target not in written
    }
    sources: dict[Any, _Source] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name not in constant:
            sources[node] = _Source.INPUT
        elif node.op == "call_function":
            sources[node] = _source_of(node, sources)
    return tuple(
        _CONSTANTS[_Source.LITERAL if _is_empty(value) else sources.get(value, _Source.LITERAL)]
        for spec, value in zip(signature.output_specs, returned_nodes(exported.graph), strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    )


def _source_of(node: torch.fx.Node, sources: Mapping[torch.fx.Node, _Source]) -> _Source:
    """Return the source of the result of an operator by the sources of the nodes before it."""
    target: Any = node.target
    read, least = node.all_input_nodes, _Source.COMPUTED
    if isinstance(target, OpOverload):
        if _is_arbitrary(target):
            return _Source.INPUT
        name = target._schema.name.rpartition("::")[2]  # noqa: SLF001 - torch has no public name for it
        if name in _SHAPE_ALONE:
            read = [one for one in read if one is not node.args[0]]
        if name in _MOVES or _is_view(target):
            least = _Source.LITERAL
    elif target is operator.getitem or getattr(target, "__module__", "") in ("_operator", "math", "torch"):
        # The node picks a result of several, or computes with sizes.
        least = _Source.LITERAL
    elif not (bodies := _bodies(node)) or not all(map(_is_repeatable, bodies)):
        return _Source.INPUT
    return max((least, *(sources.get(one, _Source.LITERAL) for one in read)))


def _bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Return the graphs that a higher-order operator runs, such as the operator of `torch.no_grad()`."""
    owner: Any = node.graph.owning_module
    found = [owner.get_submodule(str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in found if isinstance(one, torch.fx.GraphModule)]


def _is_repeatable(body: torch.fx.GraphModule) -> bool:
    """Return whether a graph computes equal outputs for equal inputs and writes to none."""
    called = [node for node in body.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return all(
        isinstance(node.target, OpOverload) and not _is_arbitrary(node.target) and not writes_in_place(node)
        for node in called
    )


def _is_arbitrary(target: OpOverload) -> bool:
    """Return whether an operator returns random numbers or uninitialized memory."""
    return torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name  # noqa: SLF001 - torch has no public name for it


def _is_view(target: OpOverload) -> bool:
    arguments = target._schema.arguments  # noqa: SLF001 - torch has no public name for it
    return any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)


def _is_empty(value: Any) -> bool:
    """Return whether a tensor has no element at any dynamic size, and is a constant therefore."""
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in tensor.shape)
