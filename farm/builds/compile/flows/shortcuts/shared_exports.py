"""Export of a case, shared by its precisions. Imports torch.

A case is exported in floating point and quantized afterwards: its export is the same at every precision, and a fifth of
the time of compiling an operator. The last export of a process is kept, if its weights are small, and is taken for a
module with equal attributes, weights and outputs. A builder that traces forks for every job, without an earlier export.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from farm.base.backends.registry import runs_on_cpu
from farm.builds.compile.flows.flow import Lowering
from farm.builds.compile.flows.reference import elements_of

_MOST_BYTES = 64 * 2**20
"""Most bytes of weights of a kept export, so that a builder does not grow by a second model."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, torch.memory_format)


class _Kept(NamedTuple):
    """Export, and everything that decides it."""

    facts: tuple[Any, ...]
    """Case, method, and facts about the module before its export and about its inputs and outputs."""
    exported: torch.export.ExportedProgram
    tensors: list[Any]
    """Facts about the tensors of the export, which a later step may write to."""


_last: list[_Kept] = []


def shared_exports() -> AbstractContextManager[Any]:
    """Let a lowering take the export of the lowering before it if both have the same case and module."""
    export = Lowering.export

    def export_or_share(lowering: Lowering) -> torch.export.ExportedProgram:
        if not _may_share(lowering):
            return export(lowering)
        # The facts before the export, as a module may change while it is traced.
        calls = _facts([lowering.example.inputs, *lowering.outputs])
        facts = (lowering.case, lowering.method, _module_facts(lowering.module), calls)
        for kept in _last:
            if kept.facts == facts and kept.tensors == _tensors_of(kept.exported):
                with lowering.watch.step("export"):
                    return kept.exported
        exported = export(lowering)
        _last[:] = [_Kept(facts, exported, _tensors_of(exported))]
        return exported

    return patch.object(Lowering, "export", export_or_share)


def _may_share(lowering: Lowering) -> bool:
    """Return whether a module of known outputs has small weights, one method, fixed sizes and no state.

    The flow of the CPU hands its export to ExecuTorch, which may change it; other flows hand over copies.
    """
    case, module = lowering.case, lowering.module
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    is_simple = not lowering.others and not case.state and lowering.example.dynamic_shapes is None
    return bool(lowering.outputs) and is_simple and weights <= _MOST_BYTES and not runs_on_cpu(lowering.target.backend)


def _tensors_of(exported: torch.export.ExportedProgram) -> list[Any]:
    return _facts([dict(exported.state_dict), dict(exported.constants)])


def _module_facts(module: torch.nn.Module) -> list[Any]:
    """Return everything of a module that its trace may read: classes, weights and all other attributes."""
    parts = list(module.named_modules())
    # A hook may do anything.
    hooks = [object() for _, part in parts if any(vars(part).get(name) for name in _HOOKS)]
    # A class of its own for each module, such as of a graph, is equal to no other.
    return [*hooks, *((name, type(part)) for name, part in parts), *_facts([_attributes(part) for _, part in parts])]


def _attributes(part: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without its submodules."""
    return {name: value for name, value in vars(part).items() if name != "_modules"}


def _facts(value: Any) -> list[Any]:
    """Return facts that are equal for equal values, and for no others: structure, tensors by bits, numbers and texts.

    Objects of other types are equal to none, functions and classes to themselves alone.
    """
    leaves, structure = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    first = {id(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
    # A tensor may be in several places.
    return [structure, [first[id(tensor)] for tensor in tensors], *map(_fact, leaves)]


def _fact(leaf: Any) -> Any:
    match leaf:
        case torch.Tensor():
            if (elements := elements_of(leaf)) is None:
                return object()
            digest = hashlib.sha256(elements).hexdigest()
            return type(leaf), leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.requires_grad, digest
        case _ if type(leaf) in _PLAIN:
            # repr, because 0.0 equals -0.0 and NaN differs from itself.
            return type(leaf), repr(leaf)
        case set() | frozenset() if all(type(one) in _PLAIN for one in leaf):
            return type(leaf), sorted(map(repr, leaf))
        case _ if callable(leaf) and hasattr(leaf, "__qualname__"):
            return leaf
    return object()
