"""Description of a compiled program in its `.pte` file, and the memory order of its tensors. No torch."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from farm.base.backends.registry import BACKENDS
from farm.base.errors import ConfigError
from farm.base.socs import load_socs
from farm.builds.program.flatbuffer import Flatbuffer, FlatbufferError, Positions, Slot

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


# Memory order of the tensors of a program: C order, channels last, or any other permutation of the dimensions.
#
# A `.pte` declares the order of every tensor, and XNNPACK and ExecuTorch's own kernels follow it. The QNN backend of
# ExecuTorch 1.5 does not: it reads and writes C order in every case (measured on the HTP simulator).


Order = tuple[int, ...]


class BrokenError(ValueError):
    """Problem of a file, without its name."""


class Call(NamedTuple):
    """Instruction of a method with the indices of the values that it reads and writes."""

    name: str
    in_c_order: bool
    """True for a delegate that ignores the declared order, as QNN does."""
    values: tuple[int, ...]


def memory_order(shape: Sequence[int], dim_order: Sequence[int]) -> Order:
    """Return `dim_order` if it differs from C order in memory, else (). Raises BrokenError for no permutation."""
    if not dim_order:
        return ()
    order = tuple(dim_order)
    if sorted(order) != list(range(len(shape))):
        raise BrokenError(f"has a tensor of {len(shape)} dimensions in the order {list(order[:17])}")
    moving = [dimension for dimension in order if shape[dimension] != 1]
    return () if moving == sorted(moving) else order


def find_layout(tensors: Mapping[int, Value], calls: Iterable[Call]) -> tuple[dict[int, Order], str]:
    """Return the order of `tensors` in memory while `calls` run, and the contradiction between two of these.

    C order is left out of the orders, which are by the index of the tensor.
    A call whose tensors all have one shape and one order works in any order, as element-wise operators do: the C order
    of QNN passes through it. Every other call needs the declared order.
    """
    alike: dict[int, list[int]] = {index: [] for index, tensor in tensors.items() if tensor.order}
    in_c_order: dict[int, str] = {}
    as_declared: dict[int, str] = {}
    for call in calls:
        used = [index for index in dict.fromkeys(call.values) if index in tensors]
        odd = [index for index in used if tensors[index].order]
        if not odd:
            continue
        if call.in_c_order:
            in_c_order.update(dict.fromkeys(odd, call.name))
            continue
        plain = [index for index in used if not tensors[index].order and _has_order(tensors[index].shape)]
        if plain or len({(tensors[index].shape, tensors[index].order) for index in odd}) > 1:
            as_declared.update(dict.fromkeys(odd, call.name))
        else:
            for first, second in pairwise(odd):
                alike[first].append(second)
                alike[second].append(first)
    left = list(in_c_order)
    while left:
        index = left.pop()
        new = dict.fromkeys((one for one in alike[index] if one not in in_c_order), in_c_order[index])
        in_c_order |= new
        left += new
    orders = {index: tensors[index].order for index in alike if index not in in_c_order}
    for index, name in as_declared.items():
        if (other := in_c_order.get(index)) is not None:
            return orders, (
                f"{other} has a tensor in C order that {name} takes in the order {list(tensors[index].order)}: "
                "keep the module and its inputs in C order, without memory_format=torch.channels_last"
            )
    return orders, ""


def _has_order(shape: Sequence[int]) -> bool:
    """Return whether more than one dimension has several elements."""
    return sum(dimension != 1 for dimension in shape) > 1


def to_memory(array: NDArray[np.generic], order: Order) -> NDArray[np.generic]:
    """Return the elements of `array` in their order in the memory of a tensor in `order`."""
    return np.ascontiguousarray(array.transpose(order) if order else array).reshape(-1)


def from_memory(elements: NDArray[np.generic], shape: Sequence[int], order: Order) -> NDArray[np.generic]:
    """Return the array of `shape`, in C order, whose elements lie in memory as in a tensor in `order`."""
    if not order:
        return elements.reshape(shape)
    stored = elements.reshape([shape[dimension] for dimension in order])
    return np.ascontiguousarray(stored.transpose(np.argsort(order)))


# Description of a compiled program in its `.pte` file: inputs, outputs, delegates, operators on the CPU.
#
# Layout: exir/_serialize/program.fbs behind the extended header of exir/_serialize/_program.py of executorch 1.5.1.
# No file is trusted: a malformed file ends in ConfigError and nothing else, and the work is bounded by the size of
# its description.


QNN = "QnnBackend"
"""Id of a delegate that runs on htp, gpu or lpai."""

DESCRIPTION_LIMIT = 256 * 2**20
"""Greatest size of the description that is read, in bytes: weights and delegates usually lie behind it."""

_IDENTIFIER = b"ET12"
_SCHEMA_VERSION = 0
_HEADER_AT, _HEADER_MAGIC, _HEADER_BYTES = 8, b"eh00", 24
_COMPILE_SPEC = "qnn_compile_spec"
_MOST_DIMENSIONS = 16  # kTensorDimensionLimit

_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
    15: "bfloat16", 27: "uint16", 28: "uint32", 29: "uint64",
}  # fmt: skip
# Numbers of KernelTypes in the schema, and the types in which the runner writes numbers.
_TENSOR = 5
_NUMBERS = {2: Slot(0, "<i8"), 3: Slot(0, "?"), 4: Slot(0, "<f8")}
_KINDS = {
    1: "none", 2: "int64", 3: "bool", 4: "float64", 6: "string", 7: "int list", 8: "float list", 9: "bool list",
    10: "tensor list", 11: "tensor list",
}  # fmt: skip
_KERNEL_CALL, _DELEGATE_CALL = 1, 2

_PROGRAM_VERSION, _PROGRAM_PLANS, _PROGRAM_SEGMENTS = Slot(0, "<u4"), Slot(1, "[table]"), Slot(4, "[table]")
_SEGMENT_OFFSET, _SEGMENT_SIZE = Slot(0, "<u8"), Slot(1, "<u8")
_PLAN_NAME, _PLAN_VALUES, _PLAN_CHAINS = Slot(0, "text"), Slot(2, "[table]"), Slot(5, "[table]")
_PLAN_INPUTS, _PLAN_OUTPUTS = Slot(3, "[<i4]"), Slot(4, "[<i4]")
_PLAN_OPERATORS, _PLAN_DELEGATES = Slot(6, "[table]"), Slot(7, "[table]")
_UNION_KIND, _UNION = Slot(0, "<u1"), Slot(1, "table")
_TENSOR_TYPE, _TENSOR_SIZES, _TENSOR_DYNAMISM = Slot(0, "<i1"), Slot(2, "[<i4]"), Slot(8, "<i1")
_TENSOR_ORDER = Slot(3, "[<u1]")
_CHAIN_INSTRUCTIONS = Slot(2, "[table]")
# Target: index of the operator for a call of a kernel, index of the delegate for a call of a delegate.
_CALL_TARGET, _CALL_VALUES = Slot(0, "<i4"), Slot(1, "[<i4]")
_OPERATOR_NAME, _OPERATOR_OVERLOAD = Slot(0, "text"), Slot(1, "text")
_DELEGATE_ID, _DELEGATE_SPECS = Slot(0, "text"), Slot(2, "[table]")
_DELEGATE_DATA, _DATA_LOCATION, _DATA_INDEX = Slot(1, "table"), Slot(0, "<i1"), Slot(1, "<u4")
_IN_SEGMENT = 1
_SPEC_KEY, _SPEC_VALUE = Slot(0, "text"), Slot(1, "[<u1]")
# Compile spec of a QNN delegate: backends/qualcomm/serialization/qc_compiler_spec.fbs.
_DSP = 3  # QnnExecuTorchBackendType.kDspBackend, which farm has no backend for
_QNN_SOC, _QNN_BACKEND, _QNN_ONLINE, _QNN_DUMP = Slot(0, "table"), Slot(1, "table"), Slot(4, "?"), Slot(5, "?")
_QNN_SHARED_BUFFER, _QNN_PACKAGES = Slot(7, "?"), Slot(11, "table")
_PACKAGE_INFOS, _PACKAGE_PATH = Slot(0, "[table]"), Slot(1, "text")
_SOC_MODEL, _BACKEND_TYPE = Slot(0, "<i4"), Slot(0, "<i4")
# Options of a backend, and whether its contexts share weights: of HTP and of GPU.
_SHARES_WEIGHTS = ((Slot(1, "table"), Slot(8, "?")), (Slot(2, "table"), Slot(5, "?")))


class Value(msgspec.Struct, frozen=True):
    """Input or output of a method."""

    shape: tuple[int, ...]
    """Shape, a dynamic one with its upper bounds; () for a value that is no tensor."""
    dtype: str
    """Name in numpy, and `bfloat16`, which numpy lacks; the kind of a value that is neither tensor nor number."""
    dynamic: bool = False
    """True for a shape that may be smaller in an execution."""
    is_tensor: bool = True
    """True for a tensor. The runner takes tensors only, and writes numbers (int64, float64, bool) as well."""
    number: float | None = None
    """Number in the file, for a value that is a number; a method without inputs always returns this number."""
    order: tuple[int, ...] = ()
    """Dimensions from the outermost to the innermost in memory, as in the runner's raw files; () for C order."""

    @property
    def nbytes(self) -> int:
        """Size of its raw file in bytes, for the upper bound. Raises TypeError for a type without raw files."""
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (" at most" if self.dynamic else "")


class QnnOptions(msgspec.Struct, frozen=True):
    """Options of a QNN delegate."""

    soc_model: int
    """`QcomChipset`: `soc_id` of a device profile."""
    backend: str
    """`htp`, `gpu`, `lpai` or `dsp`; `type N` for a backend that ExecuTorch 1.5 lacks."""
    online_prepare: bool
    """True for a graph that the device prepares when it loads the program."""
    dump_intermediate_outputs: bool = False
    shared_buffer: bool = False
    op_packages: tuple[str, ...] = ()
    """Paths of libraries with operators, of all machines, which QNN opens when it starts."""
    use_weight_sharing: bool = False
    """True for a program that holds the common weights of its methods once."""

    @property
    def soc(self) -> str:
        """Name of the SoC; `SoC model N` for a number without a device profile."""
        names = [soc.name for soc in load_socs().values() if soc.soc_id == self.soc_model]
        return names[0] if names else f"SoC model {self.soc_model}"


class Delegate(msgspec.Struct, frozen=True):
    """Part of a method that a backend took."""

    id: str
    """`QnnBackend`, `XnnpackBackend`."""
    qnn: QnnOptions | None = None
    """Options of QNN; None for another backend, and for a delegate without a compile spec."""


class Method(msgspec.Struct, frozen=True):
    """Entry point of a program."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    delegates: tuple[Delegate, ...]
    cpu_operators: dict[str, int]
    """Operators that no delegate took, `aten::relu.out`, and how often each is called in the file."""
    index: int = 0
    """Index among the methods of the program."""
    layout_problem: str = ""
    """Contradiction between two of its calls about the memory order of a tensor; empty for none."""
    written_inputs: tuple[int, ...] = ()
    """Positions of the inputs that its kernels write to."""
    written_outputs: tuple[int, ...] = ()
    """Position of each written input among the outputs, in the order of `written_inputs`; -1 for none."""
    written_buffers: int = 0
    """Number of buffers that its kernels write to and keep for the next execution; buffers of delegates are unknown."""

    @property
    def partitions(self) -> dict[str, int]:
        """Delegates by id, as a bundle's manifest has them."""
        return dict(Counter(delegate.id for delegate in self.delegates))


class Program(msgspec.Struct, frozen=True):
    """Description of a program in its `.pte` file."""

    path: Path
    methods: tuple[Method, ...]

    def method(self, name: str, how: str) -> Method:
        """Return the method called `name`. Raises ConfigError without it, with the hint `how` to name a method."""
        for method in self.methods:
            if method.name == name:
                return method
        names = [repr(method.name[:80]) for method in self.methods]
        lacking = f"has no method {name[:80]!r}"
        if len(names) < 2:
            problem = f"{lacking}, only {names[0]}: name that one with {how}" if names else "has no method at all"
        else:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            problem = f"{lacking}: it has {', '.join(names[:8])}{more}: name one of them with {how}"
        raise ConfigError(self.path, "", problem)

    @property
    def qnn(self) -> QnnOptions | None:
        """Options of its QNN delegates; None without any. Raises ConfigError for several SoCs or backends."""
        found = [delegate.qnn for method in self.methods for delegate in method.delegates if delegate.qnn is not None]
        for other in found[1:]:
            if (other.soc_model, other.backend) != (found[0].soc_model, found[0].backend):
                problem = f"is for {found[0].soc} ({found[0].backend}) and {other.soc} ({other.backend}) at once"
                raise ConfigError(self.path, "", problem)
        return found[0] if found else None


def read_pte(path: Path) -> Program:
    """Return the description of the program in `path`.

    Raises ConfigError for a file that is no program, is cut short, contradicts itself or is newer than executorch 1.5.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_AT + _HEADER_BYTES)
            size = file.seek(0, 2)
            header = _header(head, size)
            file.seek(0)
            data = file.read(header.description)
        return Program(path, _methods(Flatbuffer(data), header, size))
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except (BrokenError, FlatbufferError) as error:
        raise ConfigError(path, "", str(error)) from None


def qnn_payloads(data: bytes | mmap.mmap) -> list[tuple[int, int]]:
    """Return start and end of the compiled data of each QNN delegate in a segment of a `.pte`.

    ExecuTorch puts all of this data into segments behind the description; data within the description is left out.
    Raises ValueError for a file that is no program.
    """
    header = _header(data[: _HEADER_AT + _HEADER_BYTES], len(data))
    file = Flatbuffer(data[: header.description])
    root = file.root(0)
    _, segments = file.vectors(root, _PROGRAM_SEGMENTS)
    _, plans = file.vectors(root, _PROGRAM_PLANS)
    _, delegates = file.vectors(plans, _PLAN_DELEGATES)
    is_qnn = np.array([name == QNN for name in file.texts(delegates, _DELEGATE_ID)], bool)
    references = file.tables(delegates[is_qnn], _DELEGATE_DATA).positions
    indices = file.numbers(references, _DATA_INDEX)[file.numbers(references, _DATA_LOCATION) == _IN_SEGMENT]
    chosen = segments[_checked(np.unique(indices), len(segments))]
    starts, sizes = (file.numbers(chosen, slot).tolist() for slot in (_SEGMENT_OFFSET, _SEGMENT_SIZE))
    return [
        (header.segments + start, header.segments + start + size)
        for start, size in zip(starts, sizes, strict=True)
        if header.segments + start + size <= len(data)
    ]


class _Header(NamedTuple):
    description: int
    """Size in bytes of the flatbuffer at the beginning of the file."""
    segments: int
    """Position of the first segment; 0 without segments."""


def _header(head: bytes, size: int) -> _Header:
    identifier = head[4:8]
    if identifier != _IDENTIFIER:
        if identifier[:2] == _IDENTIFIER[:2] and identifier[2:].isdigit():
            raise BrokenError(
                f"is a program of format {identifier.decode()}, expected {_IDENTIFIER.decode()}: "
                "compile it with the executorch that farm uses"
            )
        raise BrokenError("is not an ExecuTorch program, a .pte file")
    header = _Header(size, 0)
    if head[_HEADER_AT : _HEADER_AT + 4] == _HEADER_MAGIC and len(head) == _HEADER_AT + _HEADER_BYTES:
        header = _Header(int.from_bytes(head[16:24], "little"), int.from_bytes(head[24:32], "little"))
    if max(header) > size:
        raise BrokenError(f"is cut short: has {size} bytes of at least {max(header)}: copy it again")
    if header.description > DESCRIPTION_LIMIT:
        raise BrokenError(
            f"has a description of {header.description} bytes, more than {DESCRIPTION_LIMIT}; "
            "compile it with its delegates in segments"
        )
    return header


def _methods(file: Flatbuffer, header: _Header, size: int) -> tuple[Method, ...]:
    root = file.root(0)
    version = int(file.numbers(root, _PROGRAM_VERSION)[0])
    if version > _SCHEMA_VERSION:
        raise BrokenError(
            f"has version {version} of the format, expected {_SCHEMA_VERSION}: "
            "a newer executorch made it; compile it with farm's ExecuTorch"
        )
    _, segments = file.vectors(root, _PROGRAM_SEGMENTS)
    offsets, sizes = (file.numbers(segments, slot).tolist() for slot in (_SEGMENT_OFFSET, _SEGMENT_SIZE))
    end = max((header.segments + offset + length for offset, length in zip(offsets, sizes, strict=True)), default=0)
    if end > size:
        raise BrokenError(f"is cut short: has {size} bytes of {end}: copy it again")
    _, plans = file.vectors(root, _PROGRAM_PLANS)
    return tuple(_method(file, plans[n : n + 1], n) for n in range(len(plans)))


def _method(file: Flatbuffer, plan: Positions, index: int) -> Method:
    values = _values(file, file.vectors(plan, _PLAN_VALUES)[1])
    delegates = _delegates(file, plan)
    kernels, delegated = _calls(file, plan, _operators(file, plan), [delegate.id for delegate in delegates])
    tensors = {number: one for number, one in enumerate(values) if one.is_tensor}
    orders, layout_problem = find_layout(tensors, [*kernels, *delegated])
    taken, given = (_checked(file.lists(plan, slot)[0], len(values)).tolist() for slot in (_PLAN_INPUTS, _PLAN_OUTPUTS))
    inputs, outputs = (
        tuple(msgspec.structs.replace(values[number], order=orders.get(number, ())) for number in numbers)
        for numbers in (taken, given)
    )
    written = _written(kernels)
    written_inputs = tuple(position for position, number in enumerate(taken) if number in written)
    return Method(
        name=file.texts(plan, _PLAN_NAME)[0],
        inputs=inputs,
        outputs=outputs,
        delegates=delegates,
        cpu_operators=dict(Counter(call.name for call in kernels)),
        index=index,
        layout_problem=layout_problem,
        written_inputs=written_inputs,
        written_outputs=tuple(
            given.index(taken[position]) if taken[position] in given else -1 for position in written_inputs
        ),
        written_buffers=len(written - set(taken)),
    )


def _written(calls: Sequence[Call]) -> set[int]:
    """Return the values that kernels write to in place, `aten::copy_`, and that no kernel before has computed.

    Kernels of other names write to their last value.
    """
    computed, written = set[int](), set[int]()
    for call in calls:
        name = call.name.partition(".")[0]
        if call.values and name.endswith("_") and not name.endswith("__"):
            written |= {call.values[0]} - computed
        else:
            computed.update(call.values[-1:])
    return written


def _values(file: Flatbuffer, values: Positions) -> tuple[Value, ...]:
    kinds = file.numbers(values, _UNION_KIND)
    held = file.tables(values, _UNION)
    places, held_kinds = np.flatnonzero(held.present), kinds[held.present]
    found = [Value((), _KINDS.get(kind, "nothing"), is_tensor=False) for kind in kinds.tolist()]
    is_tensor = held_kinds == _TENSOR
    for place, tensor in zip(places[is_tensor], _tensors(file, held.positions[is_tensor]), strict=True):
        found[place] = tensor
    for kind, slot in _NUMBERS.items():
        is_kind = held_kinds == kind
        for place, number in zip(places[is_kind], file.numbers(held.positions[is_kind], slot).tolist(), strict=True):
            found[place] = msgspec.structs.replace(found[place], number=number)
    return tuple(found)


def _tensors(file: Flatbuffer, tensors: Positions) -> list[Value]:
    columns = (
        file.numbers(tensors, _TENSOR_TYPE).tolist(),
        file.numbers(tensors, _TENSOR_DYNAMISM).tolist(),
        [_shape(sizes.tolist()) for sizes in file.lists(tensors, _TENSOR_SIZES)],
        file.lists(tensors, _TENSOR_ORDER),
    )
    return [
        Value(
            shape,
            _DTYPES.get(scalar_type, f"scalar type {scalar_type}"),
            dynamic=dynamism != 0,
            order=memory_order(shape, order.tolist()),
        )
        for scalar_type, dynamism, shape, order in zip(*columns, strict=True)
    ]


def _shape(sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) > _MOST_DIMENSIONS or min(sizes, default=0) < 0:
        raise BrokenError(f"has a tensor of the shape {list(sizes[: _MOST_DIMENSIONS + 1])}")
    return tuple(sizes)


def _operators(file: Flatbuffer, plan: Positions) -> list[str]:
    _, operators = file.vectors(plan, _PLAN_OPERATORS)
    named = zip(file.texts(operators, _OPERATOR_NAME), file.texts(operators, _OPERATOR_OVERLOAD), strict=True)
    return [f"{name}.{overload}" if overload else name for name, overload in named]


def _calls(file: Flatbuffer, plan: Positions, operators: Sequence[str], delegates: Sequence[str]) -> list[list[Call]]:
    """Return the calls of operators and the calls of delegates."""
    _, instructions = file.vectors(file.vectors(plan, _PLAN_CHAINS)[1], _CHAIN_INSTRUCTIONS)
    arguments = file.tables(instructions, _UNION)
    kinds = file.numbers(instructions, _UNION_KIND)[arguments.present]
    found = []
    for kind, names in ((_KERNEL_CALL, operators), (_DELEGATE_CALL, delegates)):
        calls = arguments.positions[kinds == kind]
        targets = _checked(file.numbers(calls, _CALL_TARGET), len(names)).tolist()
        values = [tuple(used.tolist()) for used in file.lists(calls, _CALL_VALUES)]
        in_c_order = kind == _DELEGATE_CALL
        called = [(names[target], used) for target, used in zip(targets, values, strict=True)]
        found.append([Call(name, in_c_order and name == QNN, used) for name, used in called])
    return found


def _delegates(file: Flatbuffer, plan: Positions) -> tuple[Delegate, ...]:
    _, delegates = file.vectors(plan, _PLAN_DELEGATES)
    counts, specs = file.vectors(delegates, _DELEGATE_SPECS)
    keys, values = file.texts(specs, _SPEC_KEY), file.lists(specs, _SPEC_VALUE)
    found, begin = [], 0
    for name, count in zip(file.texts(delegates, _DELEGATE_ID), counts.tolist(), strict=True):
        end = begin + count
        spec = dict(zip(keys[begin:end], values[begin:end], strict=True)).get(_COMPILE_SPEC) if name == QNN else None
        begin = end
        found.append(Delegate(name, None if spec is None else _qnn_options(spec.tobytes())))
    return tuple(found)


def _qnn_options(data: bytes) -> QnnOptions:
    """Return the options in the compile spec of a QNN delegate."""
    file = Flatbuffer(data)
    root = file.root(0)
    soc = file.tables(root, _QNN_SOC).positions
    backend = file.tables(root, _QNN_BACKEND).positions
    kind = _first(file, backend, _BACKEND_TYPE)
    _, packages = file.vectors(file.tables(root, _QNN_PACKAGES).positions, _PACKAGE_INFOS)
    names = {_DSP: "dsp", **{one.qnn_type: name for name, one in BACKENDS.items() if one.qnn_type is not None}}
    return QnnOptions(
        soc_model=_first(file, soc, _SOC_MODEL),
        backend=names.get(kind, f"type {kind}"),
        online_prepare=bool(_first(file, root, _QNN_ONLINE)),
        dump_intermediate_outputs=bool(_first(file, root, _QNN_DUMP)),
        shared_buffer=bool(_first(file, root, _QNN_SHARED_BUFFER)),
        op_packages=tuple(file.texts(packages, _PACKAGE_PATH)),
        use_weight_sharing=any(
            _first(file, file.tables(backend, options).positions, shares) for options, shares in _SHARES_WEIGHTS
        ),
    )


def _first(file: Flatbuffer, tables: Positions, slot: Slot) -> int:
    return int(file.numbers(tables, slot)[0]) if len(tables) else slot.default


def _checked(indices: Any, count: int) -> Positions:
    positions: Positions = indices.astype(np.int64)
    if len(positions) and (positions.min() < 0 or positions.max() >= count):
        raise BrokenError(f"is malformed: names part {positions.max()} of {count}")
    return positions
