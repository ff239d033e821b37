"""Calls of a module with copies of its tensors, and the state of the module. Imports torch.

A module may write to its inputs and return views of them or of its buffers: without copies, references of several
samples would share memory, and the writes of a call would change the inputs of the next.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from farm.base.errors import ConfigError
from farm.suites.suite import Case

Tensors = tuple[torch.Tensor, ...]

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
# Positions of arguments of both operators.
_STATISTICS, _TRAINING = 3, 5
_PLAIN_KEY = re.compile(r"[\w-]+")
_PLAIN = (bool, int, float, str)
_INTERNALS = frozenset(vars(torch.nn.Module()))


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
            raise _refusal(case, problem)
    if not leaves:
        raise _refusal(case, "forward returns no tensor, expected one or more")
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


class ModuleState:
    """State of a module before calls: its buffers, parameters and other attributes.

    Contents are compared, as writes to `.data` do not change the version counter. Buffers are compared with copies
    (NaN equals NaN), parameters and other tensors by checksums, as copies would double the memory.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._parameters = _with_contents(module.named_parameters())
        self._attributes = _with_contents(_attributes(module))

    def written_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers with other contents than before the calls."""
        return tuple(
            name
            for name, buffer in self._module.named_buffers()
            if name not in self._buffers or not equal(buffer, self._buffers[name])
        )

    def written_parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that were written or replaced."""
        return _changed(self._parameters, _with_contents(self._module.named_parameters()))

    def has_same_attributes(self) -> bool:
        """Return whether everything beside buffers and parameters is as before the calls."""
        return not _changed(self._attributes, _with_contents(_attributes(self._module)))


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


def _contents(value: Any) -> tuple[int, int]:
    """Return version and checksum of a tensor or an array; zeros for other values, which are compared directly."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return 0, zlib.crc32(value.tobytes())
    if not isinstance(value, torch.Tensor):
        return 0, 0
    version = 0 if value.is_inference() else value._version  # noqa: SLF001 - torch has no other name
    elements = elements_of(value)
    return version, 0 if elements is None else zlib.crc32(elements)


def _with_contents(values: Iterable[tuple[str, Any]]) -> dict[str, tuple[Any, tuple[int, int]]]:
    # References keep the tensors and objects alive, so that no new object gets the address of a replaced one.
    return {name: (value, _contents(value)) for name, value in values}


def _changed(
    before: Mapping[str, tuple[Any, tuple[int, int]]], after: Mapping[str, tuple[Any, tuple[int, int]]]
) -> tuple[str, ...]:
    """Return the names of values that were replaced or written."""

    def is_same(one: Any, other: Any) -> bool:
        return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)

    return tuple(
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or before[name][1] != after[name][1]
        or not is_same(before[name][0], after[name][0])
    )


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the values that modules keep beside buffers and parameters, each with a name of its own."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _INTERNALS:
                for number, leaf in enumerate(pytree.tree_leaves(value)):
                    yield f"{name}.{key}.{number}", leaf


def _refusal(case: Case, problem: str) -> ConfigError:
    return ConfigError(case.manifest, f"case.{case.name}.module", problem)
