"""Memory order of the tensors of a program: C order, channels last, or any other permutation of the dimensions.

A `.pte` declares the order of every tensor, and XNNPACK and ExecuTorch's own kernels follow it. The QNN backend of
ExecuTorch 1.5 does not: it reads and writes C order in every case (measured on the HTP simulator).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

Order = tuple[int, ...]


class LayoutError(ValueError):
    """Order of dimensions in a file that is no permutation."""


class DeclaredTensor(NamedTuple):
    """Tensor of a method as its file declares it."""

    shape: tuple[int, ...]
    order: Order
    """Dimensions from the outermost to the innermost in memory; () for C order."""


class Call(NamedTuple):
    """Instruction of a method with the indices of the values that it reads and writes."""

    name: str
    in_c_order: bool
    """True for a delegate that ignores the declared order, as QNN does."""
    values: tuple[int, ...]


class Layout(NamedTuple):
    """Memory orders of a method's tensors, and the contradiction between two of its calls."""

    orders: dict[int, Order]
    """Order by index of the value; C order for a value without an entry."""
    problem: str


def memory_order(shape: Sequence[int], dim_order: Sequence[int]) -> Order:
    """Return `dim_order` if it differs from C order in memory, else (). Raises LayoutError for no permutation."""
    if not dim_order:
        return ()
    order = tuple(dim_order)
    if sorted(order) != list(range(len(shape))):
        raise LayoutError(f"has a tensor of {len(shape)} dimensions in the order {list(order[:17])}")
    moving = [dimension for dimension in order if shape[dimension] != 1]
    return () if moving == sorted(moving) else order


def find_layout(tensors: Mapping[int, DeclaredTensor], calls: Iterable[Call]) -> Layout:
    """Return the order that each of `tensors` has in memory while `calls` run.

    A call whose tensors all have one shape and one order works in any order, as element-wise operators do: the C order
    of QNN passes through it. Every other call needs the declared order.
    """
    groups = _Groups(index for index, tensor in tensors.items() if tensor.order)
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
        if plain or len({tensors[index] for index in odd}) > 1:
            as_declared.update(dict.fromkeys(odd, call.name))
        else:
            groups.join(odd)
    c_groups = {groups.of(index): name for index, name in in_c_order.items()}
    orders = {index: tensors[index].order for index in groups if groups.of(index) not in c_groups}
    for index, name in as_declared.items():
        if (other := c_groups.get(groups.of(index))) is not None:
            return Layout(
                orders,
                f"{other} has a tensor in C order that {name} takes in the order {list(tensors[index].order)}: "
                "keep the module and its inputs in C order, without memory_format=torch.channels_last",
            )
    return Layout(orders, "")


def _has_order(shape: Sequence[int]) -> bool:
    """Return whether more than one dimension has several elements."""
    return sum(dimension != 1 for dimension in shape) > 1


class _Groups:
    """Indices of tensors that have the same order in memory."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._parents = {index: index for index in indices}

    def __iter__(self) -> Iterator[int]:
        return iter(self._parents)

    def of(self, index: int) -> int:
        """Return the index that stands for the group."""
        while self._parents[index] != index:
            self._parents[index] = index = self._parents[self._parents[index]]
        return index

    def join(self, indices: Sequence[int]) -> None:
        """Merge the groups of `indices`."""
        for index in indices[1:]:
            self._parents[self.of(index)] = self.of(indices[0])


def to_memory(array: NDArray[np.generic], order: Order) -> NDArray[np.generic]:
    """Return the elements of `array` in their order in the memory of a tensor in `order`."""
    return np.ascontiguousarray(array.transpose(order) if order else array).reshape(-1)


def from_memory(elements: NDArray[np.generic], shape: Sequence[int], order: Order) -> NDArray[np.generic]:
    """Return the array of `shape`, in C order, whose elements lie in memory as in a tensor in `order`."""
    if not order:
        return elements.reshape(shape)
    stored = elements.reshape([shape[dimension] for dimension in order])
    return np.ascontiguousarray(stored.transpose(np.argsort(order)))
