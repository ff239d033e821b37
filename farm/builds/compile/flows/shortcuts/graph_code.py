"""Graphs of torch: their origins copied and their Python code generated less often. Imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from torch.fx.graph_module import GraphModule
from torch.fx.traceback import NodeSource

_COPY = "__deepcopy__"
_GENERATED = ("forward", "_code", "_lineno_map", "_prologue_start")
"""Attributes that torch sets when it generates the code of a graph module."""


def shared_origins() -> AbstractContextManager[Any]:
    """Let copies of a node share the record of its origin, which torch never changes.

    Each pass adds a link to the chain of every node, and torch copied the whole chain each time: a seventh of the time
    of a compilation.
    """
    if hasattr(NodeSource, _COPY):
        return nullcontext()
    return patch.object(NodeSource, _COPY, lambda source, _memo: source, create=True)


def late_code() -> AbstractContextManager[Any]:
    """Let torch generate the Python code of a graph when the code is read or called, and not after every pass.

    Passes interpret a graph node by node: a compilation generated code 500 times and used it 18 times. A graph without
    code cannot be pickled.
    """
    generate = GraphModule.recompile

    def defer(module: Any) -> None:
        codegen = module.graph._codegen  # noqa: SLF001 - as torch does in the same place
        if (tree := getattr(codegen, "pytree_info", None)) is not None:
            module._in_spec, module._out_spec = tree.in_spec, tree.out_spec  # noqa: SLF001 - as above
        for name in _GENERATED:
            vars(module).pop(name, None)
            # Each graph module has a class of its own.
            setattr(type(module), name, _LateAttribute(name, module, generate))

    return patch.object(GraphModule, "recompile", defer)


class _LateAttribute:
    """Attribute of one graph module that torch generates on the first read. The module may outlive `late_code`."""

    def __init__(self, name: str, module: Any, generate: Callable[[Any], Any]) -> None:
        self._name, self._module, self._generate = name, weakref.ref(module), generate

    def __get__(self, instance: Any, owner: type) -> Any:
        module = self._module() if instance is None else instance
        if module is None:
            return self
        self._generate(module)
        for name in _GENERATED:
            if isinstance(vars(owner).get(name), _LateAttribute):
                delattr(owner, name)
        return getattr(owner if instance is None else instance, self._name)
