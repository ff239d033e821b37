"""Copies of flat graphs of operators in place of traces by dynamo. Imports torch.

A lowering exports the quantized graph again: dynamo interprets the Python code that was generated from the graph and
builds an equal graph, which takes a fifth of the time of compiling an operator. This module copies graphs that have
only operators, in the form of dynamo's result; torch continues with the copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch._dynamo import functional_export
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.export import _trace, _unlift
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.proxy import _COPY_META_FIELDS
from torch.fx.traceback import NodeSource, NodeSourceAction
from torch.utils import _pytree as pytree

from farm.builds.compile.flows.shortcuts.tried import replaced

_GUARDS = "_guards_fn"
"""Call of torch's check of sizes, which traces to nothing for fixed sizes."""
_STEP = "Interpreter_DynamoGraphTransformer"
"""Name of dynamo's last step in the record of a node's origin."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LEFT_TO_DYNAMO = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
# Without a stack trace torch would record the stack of this process.
_NOWHERE = f'  File "{functional_export.__file__}", line -1, in forward\n'


def flat_graphs() -> AbstractContextManager[None]:
    """Let a strict export of a flat graph of operators copy the graph while the body runs."""

    def or_copy(trace: Callable[..., Any]) -> Callable[..., Any]:
        def trace_or_copy(f: Any, args: Any, kwargs: Any = None, dynamic_shapes: Any = None, **options: Any) -> Any:
            is_usual = not kwargs and not dynamic_shapes and options.get("restore_fqn") is False
            if is_usual and not options.get("preserve_module_call_signature") and _is_flat(f, args):
                # dynamo does this before it traces a graph, to drop its cached frames of earlier modules.
                torch._dynamo.reset()  # noqa: SLF001 - torch has no other name
                return _copy(f, args)
            return trace(f, args, kwargs, dynamic_shapes, **options)

        return trace_or_copy

    return replaced(_trace, "_export_to_torch_ir", or_copy, tried_only=True)


def _is_flat(module: Any, args: tuple[Any, ...]) -> bool:
    """Return whether dynamo would return the graph of `module` unchanged for the inputs `args`."""
    if not isinstance(module, torch.fx.GraphModule) or not _is_as_made(module):
        return False
    inputs = module.graph.find_nodes(op="placeholder")
    are_tensors = all(type(one) is torch.Tensor and not one.requires_grad for one in args)
    if not are_tensors or len(inputs) != len(args) or len({id(one) for one in args}) != len(args):
        return False
    return all(map(_is_simple, module.graph.nodes)) and _has_simple_tensors(module)


def _is_as_made(module: torch.fx.GraphModule) -> bool:
    """Return whether calls of a module run its graph alone, besides torch.export's checks of inputs."""
    made = type(module).__mro__[1] in (torch.fx.GraphModule, _unlift._StatefulGraphModule)  # noqa: SLF001 - torch has no public name
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001 - as above
    is_usual = all(getattr(hook, "__module__", "") == _unlift.__name__ for hook in hooks)
    return made and is_usual and isinstance(module.graph._codegen, _PyTreeCodeGen)  # noqa: SLF001 - as above


def _is_simple(node: torch.fx.Node) -> bool:
    match node.op:
        case "placeholder":
            return True
        case "get_attr":
            return bool(node.users)
        case "call_module":
            return node.target == _GUARDS and not node.users
        case "output":
            given = node.args[0]
            is_flat = isinstance(given, tuple | list) and all(map(_is_call, given))
            return is_flat and len(set(given)) == len(given)
        case "call_function":
            return bool(node.users) and _has_fixed_sizes(node.meta.get("val")) and _is_repeatable(node)
    return False


def _is_repeatable(node: torch.fx.Node) -> bool:
    """Return whether a call returns tensors and does nothing else; others are left to dynamo.

    Others are operators in place, random numbers, and sizes that depend on data.
    """
    target, arguments = node.target, pytree.tree_leaves((node.args, node.kwargs))
    if target is operator.getitem:
        given, place = node.args
        return _is_call(given) and given.target is not operator.getitem and isinstance(place, int)
    if not isinstance(target, OpOverload) or any(isinstance(one, _SYMBOLS) for one in arguments):
        return False
    schema = target._schema  # noqa: SLF001 - torch has no public name
    returns_tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)
    return returns_tensors and not schema.is_mutable and not _LEFT_TO_DYNAMO.intersection(target.tags)


def _is_call(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and value.op == "call_function"


def _has_fixed_sizes(value: Any) -> bool:
    """Return whether a recorded value has tensors of fixed sizes alone; True for a value that is not recorded."""
    values = value if isinstance(value, tuple | list) else [value]
    return all(
        one is None or (isinstance(one, torch.Tensor) and all(type(size) is int for size in one.shape))
        for one in values
    )


def _has_simple_tensors(module: torch.fx.GraphModule) -> bool:
    """Return whether each constant of the graph is a tensor of its own with one node."""
    nodes = module.graph.find_nodes(op="get_attr")
    tensors = [attrgetter(node.target)(module) for node in nodes]
    parts = [(node.args[0], node.args[1]) for node in module.graph.nodes if node.target is operator.getitem]
    return (
        all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
        and len({id(one) for one in tensors}) == len(nodes) == len({_flat(node) for node in nodes})
        and len(set(parts)) == len(parts)
    )


def _flat(node: torch.fx.Node) -> str:
    return f"L__self___{str(node.target).replace('.', '_')}"


def _copy(module: torch.fx.GraphModule, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Return the graph of `module` in dynamo's order: inputs first, and each result before its parts."""
    fake_mode = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True),
        allow_non_fake_inputs=True,
        export=True,
    )
    graph, root, flat = torch.fx.Graph(), torch.nn.Module(), {}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, (node, value) in enumerate(zip(module.graph.find_nodes(op="placeholder"), args, strict=True)):
        copied = graph.create_node("placeholder", f"arg_{number}", name=f"l_flat_args_{number}_")
        copied.meta = {"stack_trace": _NOWHERE, "val": fake_mode.from_tensor(value, static_shapes=True)}
        copies[node] = copied
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor, name = attrgetter(node.target)(module), _flat(node)
            if isinstance(tensor, torch.nn.Parameter):
                root.register_parameter(name, tensor)
            else:
                root.register_buffer(name, tensor)
            flat[name] = str(node.target)
            copies[node] = graph.create_node("get_attr", name, name=node.name)
            copies[node].meta = _meta(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            _copy_call(graph, node, node, copies)
            parts = [user for user in node.users if user.target is operator.getitem]
            for part in sorted(parts, key=lambda one: int(one.args[1])):
                # dynamo unpacks a result in the line that computes it.
                _copy_call(graph, part, node, copies)
        elif node.op == "output":
            graph.output(tuple(copies[one] for one in node.args[0]))
    found = torch.fx.GraphModule(root, graph)
    info = module.graph._codegen.pytree_info  # noqa: SLF001 - torch has no public name
    _, in_spec = pytree.tree_flatten((args, {}))
    found.graph._codegen = _PyTreeCodeGen(_PyTreeInfo(list(info.orig_args), in_spec, info.out_spec))  # noqa: SLF001 - as above
    found.recompile()
    found.meta = {"dynamo_flat_name_to_original_fqn": flat, "module_call_specs": {}}
    return found


def _copy_call(
    graph: torch.fx.Graph, node: torch.fx.Node, origin: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    copied = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    copied.meta = {"source_fn_stack": [(node.name, node.target)], **_meta(origin)}
    copies[node] = copied


def _meta(origin: torch.fx.Node) -> Mapping[str, Any]:
    """Return the record of a node whose line of code is the line of `origin`."""
    kept = {name: origin.meta[name] for name in _COPY_META_FIELDS if name in origin.meta}
    source = NodeSource(origin, _STEP, NodeSourceAction.CREATE)
    return {
        "stack_trace": origin.meta.get("stack_trace") or _NOWHERE,
        "nn_module_stack": {},
        **kept,
        "from_node": [source],
    }
