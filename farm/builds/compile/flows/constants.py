"""Outputs that do not depend on the inputs, by the exported graph. Imports torch."""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, OutputKind

from farm.builds.bundles.bundle import Constant
from farm.builds.compile.flows.calls import equal, returned_nodes, writes_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.export import ExportedProgram

    from farm.builds.bundles.bundle import TensorSpec
    from farm.builds.compile.flows.calls import Tensors

_CONSTANT_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Operators that read the shape and type of their first argument, and none of its elements.
_SHAPE_ALONE = frozenset(
    {
        "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "sym_numel", "sym_size", "sym_storage_offset",
        "sym_stride", "zeros_like",
    }
)  # fmt: skip
# Operators that make or move elements and compute none. Views are known by their schema.
_MOVES = frozenset(
    {
        "_to_copy", "arange", "cat", "clone", "constant_pad_nd", "copy_", "detach_", "expand_copy", "eye", "fill",
        "fill_", "flip", "full", "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh_copy",
        "masked_fill", "ones", "permute_copy", "repeat", "roll", "scalar_tensor", "select_scatter", "slice_scatter",
        "stack", "to", "tril", "triu", "where", "zero_", "zeros", *_SHAPE_ALONE,
    }
)  # fmt: skip
# Operators that return uninitialized memory, and operators that write to all of a tensor.
_EMPTY = ("empty", "new_empty")
_WHOLE = frozenset({"copy_", "fill_", "zero_"})


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

    Inputs that the program writes to stay as they are.
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
    """Return the kind of constant of each output of the module; NONE for an output that depends on inputs."""
    sources = _Sources(exported)
    specs = exported.graph_signature.output_specs
    return tuple(
        _CONSTANTS[_Source.LITERAL if _is_empty(value) else sources.of(value)]
        for spec, value in zip(specs, returned_nodes(exported.graph), strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    )


class _Sources:
    """Sources of all values of a graph.

    Values that may share memory have one source: an operator in place changes each of them.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs}
        inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
        called = [node for node in exported.graph.nodes if node.op == "call_function"]
        self._shared: dict[torch.fx.Node, torch.fx.Node] = {}
        self._source: dict[torch.fx.Node, _Source] = {}
        for node in called:
            for argument in _sharing_arguments(node):
                one, other = self._memory(argument), self._memory(node)
                if one is not other:
                    self._shared[one] = other
        written = {self._memory(target) for node in called for target in _written_arguments(node)}
        for node in inputs:
            # A written buffer holds the values of the previous call.
            if kinds.get(node.name) not in _CONSTANT_INPUTS or self._memory(node) in written:
                self._raise(node, _Source.INPUT)
        while any(self._raise(node, self._result(node)) for node in called):
            pass

    def of(self, value: Any) -> _Source:
        """Return the source of an argument of a node."""
        if not isinstance(value, torch.fx.Node):
            return _Source.LITERAL
        return self._source.get(self._memory(value), _Source.LITERAL)

    def _memory(self, node: torch.fx.Node) -> torch.fx.Node:
        while node in self._shared:
            node = self._shared[node]
        return node

    def _raise(self, node: torch.fx.Node, source: _Source) -> bool:
        """Let the memory of `node` have at least `source`; return whether it had less."""
        if self.of(node) >= source:
            return False
        self._source[self._memory(node)] = source
        return True

    def _result(self, node: torch.fx.Node) -> _Source:
        target: Any = node.target
        if isinstance(target, OpOverload):
            name = _name(node)
            if _is_arbitrary(target):
                return _Source.LITERAL if _is_overwritten(node) else _Source.INPUT
            read = node.all_input_nodes
            if name in _SHAPE_ALONE:
                read = [one for one in read if one is not node.args[0]]
            least = _Source.LITERAL if name in _MOVES or _is_view(target) else _Source.COMPUTED
            return max((least, *map(self.of, read)))
        if target is operator.getitem or getattr(target, "__module__", "") in ("_operator", "math", "torch"):
            # The node picks a result of several, or computes with sizes.
            return max((_Source.LITERAL, *map(self.of, node.all_input_nodes)))
        bodies = _bodies(node)
        if bodies and all(map(_is_repeatable, bodies)):
            operands = [one for one in node.all_input_nodes if one.op != "get_attr"]
            return max((_Source.COMPUTED, *map(self.of, operands)))
        return _Source.INPUT


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


def _is_overwritten(node: torch.fx.Node) -> bool:
    """Return whether the first use of new memory writes to all of it."""
    first = next(iter(node.users), None)
    return first is not None and _name(node).startswith(_EMPTY) and _name(first) in _WHOLE and first.args[0] is node


def _name(node: torch.fx.Node) -> str:
    """Return the name of an operator without its namespace; empty for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema is not None else ""


def _is_view(target: OpOverload) -> bool:
    arguments = target._schema.arguments  # noqa: SLF001 - torch has no public name for it
    return any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)


def _sharing_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that may share memory with the result of an operator."""
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], torch.fx.Node) else []
    return _arguments(node, lambda one: one.alias_info is not None)


def _written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that an operator writes to; all arguments if its schema marks none as written."""
    if not writes_in_place(node):
        return []
    found = _arguments(node, lambda one: one.alias_info is not None and one.alias_info.is_write)
    return found or list(node.all_input_nodes)


def _arguments(node: torch.fx.Node, chosen: Callable[[Any], bool]) -> list[torch.fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found: list[torch.fx.Node] = []
    for place, one in enumerate(schema.arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(one.name)
        if chosen(one):
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [each for each in values if isinstance(each, torch.fx.Node)]
    return found


def _is_empty(value: Any) -> bool:
    """Return whether a tensor has no element at any dynamic size, and is a constant therefore."""
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in tensor.shape)
