"""Calls of a module with copies of its tensors, and the state of the module. Imports torch.

A module may write to its inputs and return views of them or of its buffers: without copies, references of several
samples would share memory, and the writes of a call would change the inputs of the next.
"""

from __future__ import annotations

import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from farm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from farm.suites.suite import Case

Tensors = tuple[torch.Tensor, ...]

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
# Positions of arguments of both operators.
_STATISTICS, _TRAINING = 3, 5
_PLAIN_KEY = re.compile(r"[\w-]+")
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
        self._buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
        # References keep the tensors and objects alive, so that no new object gets the address of a replaced one.
        self._parameters = {name: (one, _contents(one)) for name, one in module.named_parameters()}
        self._attributes = _attributes(module)

    def written_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers with other contents than before the calls."""
        return tuple(
            name
            for name, buffer in self._module.named_buffers()
            if name not in self._buffers or not equal(buffer, self._buffers[name][1])
        )

    def written_parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that were written or replaced."""
        return tuple(
            name
            for name, one in self._module.named_parameters()
            if name not in self._parameters
            or self._parameters[name][0] is not one
            or self._parameters[name][1] != _contents(one)
        )

    def is_changed(self) -> bool:
        """Return whether calls changed a buffer, a parameter or an attribute of the module."""
        return bool(self.written_buffers() or self.written_parameters()) or not self.has_same_attributes()

    def has_same_attributes(self) -> bool:
        """Return whether everything beside buffers and parameters is as before the calls."""
        return _same_attributes(self._attributes, _attributes(self._module))


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


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other name


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements, NaN among them."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN


def _contents(value: Any) -> tuple[int, int]:
    """Return version and checksum of a tensor or an array; zeros for other values, which are compared directly."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return 0, zlib.crc32(value.tobytes())
    if not isinstance(value, torch.Tensor):
        return 0, 0
    version = _version(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        # Subclasses and other layouts have no bytes of their own.
        return version, 0
    plain = value.detach().cpu().contiguous().reshape(-1)
    return version, zlib.crc32(memoryview(plain.view(torch.uint8).numpy()))


def _attributes(module: torch.nn.Module) -> list[tuple[str, Any, tuple[int, int]]]:
    """Return the values that modules keep beside buffers and parameters, tensors and arrays with their contents."""
    return [
        (f"{name}.{key}", leaf, _contents(leaf))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _INTERNALS
        for leaf in pytree.tree_leaves(value)
    ]


def _same_attributes(
    before: Sequence[tuple[str, Any, tuple[int, int]]], after: Sequence[tuple[str, Any, tuple[int, int]]]
) -> bool:
    def is_same(one: Any, other: Any) -> bool:
        plain = (bool, int, float, str)
        return one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)

    return len(before) == len(after) and all(
        old[0] == new[0] and old[2] == new[2] and is_same(old[1], new[1])
        for old, new in zip(before, after, strict=True)
    )


def _refusal(case: Case, problem: str) -> ConfigError:
    return ConfigError(case.manifest, f"case.{case.name}.module", problem)
