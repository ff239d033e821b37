"""Memory order of tensors: what of a `.pte` decides it, and files in that order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.base.errors import ConfigError
from farm.builds.program.pte import (
    BrokenError,
    Call,
    Value,
    find_layout,
    from_memory,
    memory_order,
    read_pte,
    to_memory,
)

LAST = (0, 2, 3, 1)
IMAGE, SMALL = (Value(shape, "float32", order=LAST) for shape in ((1, 3, 8, 10), (1, 3, 4, 5)))
PLAIN = Value((1, 3, 8, 10), "float32")


def qnn(*values: int) -> Call:
    return Call("QnnBackend", in_c_order=True, values=values)


def kernel(*values: int) -> Call:
    return Call("aten::op.out", in_c_order=False, values=values)


@given(st.lists(st.integers(1, 4), max_size=5), st.randoms())
def test_files_in_any_order_give_the_array_back(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = memory_order(shape, order)
    assert np.array_equal(from_memory(to_memory(array, found), shape, found), array)
    assert np.array_equal(to_memory(array, tuple(order)), to_memory(array, found))


def test_an_order_that_moves_no_element_is_c_order() -> None:
    assert memory_order((1, 3, 8, 10), (0, 2, 3, 1)) == LAST
    assert memory_order((1, 3, 1, 1), (0, 2, 3, 1)) == ()
    assert memory_order((4, 1, 8, 10), (0, 2, 3, 1)) == ()
    assert memory_order((2, 3), ()) == ()


@pytest.mark.parametrize("order", [(0, 1, 1, 3), (0, 1, 2), (0, 1, 2, 200)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(BrokenError, match="has a tensor of 4 dimensions in the order"):
        memory_order((1, 3, 8, 10), order)


def test_element_wise_kernels_keep_the_order_of_qnn_on_either_side() -> None:
    through = find_layout({0: IMAGE, 1: IMAGE, 2: SMALL}, [kernel(0, 1), qnn(1, 2)])
    assert through == ({}, "")
    assert find_layout({0: IMAGE, 1: IMAGE, 2: IMAGE}, [qnn(0, 1), kernel(1, 2, 2)]) == ({}, "")


def test_what_programs_declare_and_do(models: Path) -> None:
    def orders(name: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], str]:
        [method] = read_pte(models / name).methods
        return [one.order for one in method.inputs], [one.order for one in method.outputs], method.layout_problem

    assert orders("last_qnn.pte") == ([()], [()], "")
    assert orders("last_xnnpack.pte") == ([LAST], [LAST], "")
    assert orders("last_output.pte") == ([()], [LAST], "")
    assert orders("last_cpu.pte") == ([LAST], [LAST, ()], "")
    assert "_to_dim_order_copy.out takes in the order [0, 2, 3, 1]" in orders("last_mixed.pte")[2]


def test_a_file_with_an_impossible_order_is_refused_as_a_file(models: Path, tmp_path: Path) -> None:
    data = (models / "last_xnnpack.pte").read_bytes()
    declared = (4).to_bytes(4, "little") + bytes(LAST)
    assert declared in data
    path = tmp_path / "broken.pte"
    path.write_bytes(data.replace(declared, (4).to_bytes(4, "little") + bytes((0, 2, 2, 1))))
    with pytest.raises(ConfigError, match=r"broken.pte: has a tensor of 4 dimensions in the order \[0, 2, 2, 1\]"):
        read_pte(path)
