"""Reference of a program: its module called on copies, with state, writes and names, and outputs that are constant.

Imports torch and executorch.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import torch
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import Constant, TensorSpec
from farm.builds.program.pte import Order
from farm.suites.suite import Case

# Calls of a module with copies of its tensors.
#
# A module may write to its inputs and return views of them or of its buffers: without copies, references of several
# samples would share memory, and the writes of a call would change the inputs of the next.


Tensors = tuple[torch.Tensor, ...]

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
# Positions of arguments of both operators.
_STATISTICS, _TRAINING = 3, 5
_PLAIN_KEY = re.compile(r"[\w-]+")


class Call(NamedTuple):
    """Result of one call of a module: copies, which later calls leave alone."""

    outputs: Any
    """Outputs in the structure that the module returns."""
    inputs: Tensors
    """Copies of the inputs after the call: a written input differs from the input before."""


def copies(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return copies of the tensors."""
    return tuple(tensor.detach().clone() for tensor in tensors)


def call(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Call:
    """Call `module` with copies of `inputs`."""
    given = copies(inputs)
    outputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), module(*given))
    return Call(outputs, given)


def flat_outputs(outputs: Any, case: Case) -> Tensors:
    """Return the tensors of a return value, in the order of the export signature.

    Raises ConfigError for an element that is no tensor.
    """
    _allow_serialization(outputs)
    leaves = pytree.tree_leaves(outputs)
    for leaf, name in zip(leaves, _paths(outputs), strict=True):
        if not isinstance(leaf, torch.Tensor):
            shown = repr(leaf) if isinstance(leaf, (bool, int, float, type(None))) else f"a {type(leaf).__name__}"
            where = f" in output {name}" if name else ""
            problem = f"forward returns {shown[:80]}{where}, expected tensors alone: leave it out of the return value"
            raise case.error("module", problem)
    if not leaves:
        raise case.error("module", "forward returns no tensor, expected one or more")
    return tuple(leaves)


def output_names(outputs: Any) -> tuple[str, ...]:
    """Return the path of each tensor in a return value: `aux`, `[1].0`.

    The names are empty for a single tensor and for a plain tuple of tensors, whose numbers suffice.
    """
    if isinstance(outputs, torch.Tensor):
        return ("",)
    names = _paths(outputs)
    numbered = type(outputs) in (tuple, list) and all(isinstance(one, torch.Tensor) for one in outputs)
    return ("",) * len(names) if numbered else names


def _paths(outputs: Any) -> tuple[str, ...]:
    try:
        found, _ = pytree.tree_flatten_with_path(outputs)
    except ValueError:
        # torch has a container in the value that was registered without names of its parts.
        return tuple(f"[{index}]" for index in range(len(pytree.tree_leaves(outputs))))
    return tuple(_path_name(path) for path, _ in found)


def _path_name(path: Sequence[Any]) -> str:
    name = ""
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            name += f".{key.idx}" if name else f"[{key.idx}]"
            continue
        part = str(key.name if isinstance(key, pytree.GetAttrKey) else getattr(key, "key", key))
        if _PLAIN_KEY.fullmatch(part) is None:
            # Quotes keep the key on one line and apart from the paths of other outputs.
            name += f"[{part!r}]"
        else:
            name += f".{part}" if name else part
    return name


def _allow_serialization(outputs: Any) -> None:
    """Register the named tuples in `outputs`: ExecuTorch 1.5 serializes the structure and refuses unregistered ones."""
    kind = type(outputs)
    if pytree.is_namedtuple_class(kind) and kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")  # noqa: SLF001 - no other name
    if isinstance(outputs, (tuple, list, dict)):
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            _allow_serialization(part)


@contextmanager
def state_kept(graph: torch.fx.GraphModule, buffers: Collection[str] | None = None) -> Iterator[None]:
    """Restore the buffers of `graph` after a body that calls it: all buffers, or only `buffers`."""
    kept = []
    if any(writes_in_place(node) for node in graph.graph.nodes):
        kept = [
            (buffer, buffer.detach().clone())
            for name, buffer in graph.named_buffers()
            if buffers is None or name in buffers
        ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, contents in kept:
                buffer.copy_(contents)


def returned_nodes(graph: torch.fx.Graph) -> list[Any]:
    """Return the outputs of a graph, flattened: nodes and constants."""
    [end] = [node for node in graph.nodes if node.op == "output"]
    returned: list[Any] = pytree.tree_leaves(end.args[0])
    return returned


def writes_in_place(node: torch.fx.Node) -> bool:
    """Return whether an operator of an exported graph writes to its arguments."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    # The schemas of normalizations do not mention the statistics that training updates.
    trains = node.target in _NORMS and node.args[_STATISTICS] is not None and node.args[_TRAINING] is True
    return bool(schema.is_mutable) or trains


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements, NaN among them."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN


def elements_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes of a tensor in C order; None for subclasses and other layouts, which have none of their own."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_quantized:
        return None
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


# Calls of a module sample by sample, with state, writes and names.


_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


class SampleRun(NamedTuple):
    """Inputs and outputs of a module for all samples of a case, in their order."""

    inputs: list[Tensors]
    """Inputs of each sample, including state from the sample before (farm.suites.suite)."""
    outputs: list[Tensors]
    left: list[Tensors]
    """Inputs after the call, with the writes of the module."""
    names: tuple[str, ...]
    """Path of each output in the return value: `output_names`."""

    def program_outputs(self, written: Sequence[int]) -> list[Tensors]:
        """Return the outputs of every sample, after the inputs `written` with their values after the call."""
        return [
            (*(left[place] for place in written), *outputs)
            for left, outputs in zip(self.left, self.outputs, strict=True)
        ]


def run_samples(module: torch.nn.Module, case: Case, samples: Sequence[Tensors]) -> SampleRun:
    """Return the run of `module` over `samples`, each with the state from the sample before it.

    `samples` keep their values. Raises ConfigError for an output that is no tensor, or does not fit the input.
    """
    ran = SampleRun([], [], [], ())
    for sample in samples:
        inputs = list(sample)
        for one in case.state if ran.outputs else ():
            inputs[one.input] = _handed_on(case, ran.outputs[-1], one.output, inputs[one.input])
        called = call(module, inputs)
        ran.inputs.append(tuple(inputs))
        ran.outputs.append(flat_outputs(called.outputs, case))
        ran.left.append(called.inputs)
        ran = ran._replace(names=output_names(called.outputs))
    return ran


def _handed_on(case: Case, outputs: Tensors, index: int, wanted: torch.Tensor) -> torch.Tensor:
    if index >= len(outputs):
        raise case.error("state", f"names output {index}, and there are {len(outputs)}, from 0")
    found = outputs[index]
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        given, taken = map(tensor_spec, (found, wanted))
        raise case.error("state", f"output {index} is {given}, and the input takes {taken}")
    return found


class Writes(NamedTuple):
    """Writes that outlive a call."""

    inputs: tuple[int, ...] = ()
    """Positions of the written inputs, in the order of a signature."""
    buffers: tuple[str, ...] = ()
    """Paths of the written buffers in the module."""

    def named(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """Return `input x` and `buffer total`, `inputs` being the names of all inputs."""
        return (*(f"input {inputs[index]}" for index in self.inputs), *(f"buffer {name}" for name in self.buffers))

    def union(self, others: Writes) -> Writes:
        """Return the writes of both."""
        return Writes(
            tuple(dict.fromkeys((*self.inputs, *others.inputs))), tuple(dict.fromkeys((*self.buffers, *others.buffers)))
        )


def write_facts(needed: Writes, found: Writes, inputs: Sequence[str]) -> dict[str, Any]:
    """Return facts of a bundle: the writes that its module needs, those `found` in its program and those it lacks."""
    names, there = needed.named(inputs), found.named(inputs)
    return {
        "writes": tuple(name for name in names if name in there),
        "lost_writes": tuple(name for name in names if name not in there),
    }


class Reference(NamedTuple):
    """Results of a module for all samples, and the writes of these calls."""

    run: SampleRun
    writes: Writes
    input_names: tuple[str, ...]

    def output_specs(
        self, tensors: Tensors, written: Sequence[int], quantized: torch.fx.GraphModule | None = None
    ) -> list[TensorSpec]:
        """Return the outputs of a program as in a manifest: `tensors`, which begin with the inputs `written`.

        Quantization steps are from the converted graph `quantized`.
        """
        steps = output_steps(quantized) if quantized is not None else [None] * len(self.run.names)
        names = [*((self.input_names[place], None) for place in written), *zip(self.run.names, steps, strict=True)]
        return [
            msgspec.structs.replace(tensor_spec(tensor), step=step, name=name, written=number < len(written))
            for number, (tensor, (name, step)) in enumerate(zip(tensors, names, strict=True))
        ]


def tensor_spec(tensor: torch.Tensor, order: Order = ()) -> TensorSpec:
    """Return a tensor as a manifest describes it."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), order=order)


def output_steps(quantized: torch.fx.GraphModule) -> list[float | None]:
    """Return the quantization step of every output of a converted graph, in the unit of the output.

    None for an output without quantization, or without one scale for the whole tensor.
    """
    steps: list[float | None] = []
    for node in returned_nodes(quantized.graph):
        while isinstance(node, torch.fx.Node) and node.target is operator.getitem:
            node = node.args[0]  # noqa: PLW2901 - the operator with several outputs
        scale = node.args[1] if isinstance(node, torch.fx.Node) and str(node.target) == _DEQUANTIZE else None
        steps.append(scale if isinstance(scale, float) else None)
    return steps


def run_reference(
    module: torch.nn.Module, case: Case, samples: Sequence[Tensors], make: Callable[[], torch.nn.Module]
) -> Reference:
    """Return results and writes of `module` for `samples`, in order, by calls of a copy: `module` stays as it is.

    A module that cannot be copied, as it holds a lock, is made again by `make`. Raises ConfigError for a written
    parameter.
    """
    try:
        called = copy.deepcopy(module)
    except Exception:  # noqa: BLE001 - attributes of the user's own raise what they want
        called = make()
    run = run_samples(called, case, samples)
    if parameters := _written(module.named_parameters(), called.named_parameters()):
        problem = f"forward writes to its parameter {parameters[0]}: a program has no such write; make it a buffer"
        raise case.error("module", problem)
    calls = list(zip(run.inputs, run.left, strict=True))
    inputs = tuple(
        place for place in range(len(samples[0])) if any(not equal(given[place], left[place]) for given, left in calls)
    )
    writes = Writes(inputs, _written(module.named_buffers(), called.named_buffers()))
    return Reference(run, writes, _parameter_names(module, len(samples[0])))


def _written(before: Iterable[tuple[str, torch.Tensor]], after: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Return the names of the tensors with other elements than before, and of new ones."""
    known = dict(before)
    return tuple(
        name
        for name, tensor in after
        if name not in known or (elements_of(tensor) is not None and not equal(tensor, known[name]))
    )


def refused_write(error: Exception, reference: Reference, case: Case, backend: str) -> ConfigError:
    """Return the error for a module with writes that the flow of `backend` failed to compile, because of `error`."""
    named = " and its ".join(reference.writes.named(reference.input_names))
    problem = f"forward writes to its {named}, and the {backend} flow cannot compile it: return the new value instead"
    reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return case.error("module", f"{problem} ({reason})")


def _parameter_names(module: torch.nn.Module, count: int) -> tuple[str, ...]:
    """Return the names of the first `count` parameters of `forward`; the number of an input without a name."""
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind not in variadic]
    return (*names[:count], *map(str, range(len(names), count)))


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return an exported module without in-place operators, which torch.export keeps: its signature has the writes."""
    if any(writes_in_place(node) for node in exported.graph.nodes):
        return exported.run_decompositions({})
    return exported


def find_writes(reference: Reference, exported: ExportedProgram, edge: ExportedProgram) -> tuple[Writes, Writes]:
    """Return the writes of a module, by its calls and its functional export, and the writes of its program."""
    found = _signature_writes(edge)
    for _, lowered, _ in get_lowered_submodules(edge.graph_module):
        # Delegates keep buffers of their own.
        inside: Any = lowered.original_module
        found = found.union(Writes(buffers=_signature_writes(inside).buffers))
    return _signature_writes(exported).union(reference.writes), found


def _signature_writes(exported: ExportedProgram) -> Writes:
    signature = exported.graph_signature
    places = {str(name): index for index, name in enumerate(signature.user_inputs)}
    inputs = tuple(places[name] for name in signature.user_inputs_to_mutate.values())
    return Writes(inputs, tuple(signature.buffers_to_mutate.values()))


# Outputs that do not depend on the inputs, by the exported graph.


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
