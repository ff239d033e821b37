"""Parts of a graph that a backend took: real lowered graphs, most of them for HTP, some taken in part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from farm.base.errors import DelegationError


@pytest.fixture
def graphs(lowered: dict[str, Any]) -> dict[str, Any]:
    return dict(lowered["graphs"])


def test_a_graph_that_is_taken_whole_is_one_delegate(graphs: dict[str, Any]) -> None:
    whole = graphs["whole"]
    assert (whole["partitions"], whole["edge_ops"], whole["cpu_ops"]) == (1, {}, {})
    assert whole["delegated_ops"] > 3


def test_an_operator_in_the_middle_splits_the_graph(graphs: dict[str, Any]) -> None:
    split = graphs["split"]
    assert (split["partitions"], split["cpu_ops"]) == (2, {"aten.sigmoid.default": 1})


def test_an_operator_at_the_end_is_named_though_there_is_one_partition(graphs: dict[str, Any]) -> None:
    end = graphs["end"]
    assert (end["partitions"], end["cpu_ops"]) == (1, {"aten.sigmoid.default": 1})


def test_a_graph_is_divided_into_as_many_contexts_as_shares_and_no_value_goes_around_a_copy(
    graphs: dict[str, Any],
) -> None:
    shares = graphs["shares"]
    # The output of the first operator is copied once, for the second and for the last.
    assert (shares["partitions"], shares["cpu_ops"]) == (4, {"dim_order_ops._clone_dim_order.default": 3})
    assert shares["edge_ops"] == {}


def test_branches_that_do_not_need_each_other_are_no_shares_of_their_own(graphs: dict[str, Any]) -> None:
    """ExecuTorch would join them into one partition again."""
    branches = graphs["branches"]
    assert (branches["partitions"], branches["cpu_ops"]) == (3, {"dim_order_ops._clone_dim_order.default": 4})


def test_an_error_within_a_pass_is_told_in_place_of_the_list_of_passes(lowered: dict[str, Any]) -> None:
    reason = r"pass SplitGraph: ValueError: \d+ operators of the graph need each other in turn: too few for 99 shares"
    assert re.fullmatch(reason, lowered["too many shares"])


def test_a_graph_of_which_nothing_is_taken(graphs: dict[str, Any]) -> None:
    nothing = graphs["nothing"]
    assert (nothing["partitions"], nothing["delegated_ops"]) == (0, 0)
    assert nothing["cpu_ops"] == {"aten.add.Tensor": 2, "aten.mul.Tensor": 1}


def test_nodes_of_every_delegate_and_those_on_the_cpu_say_where_they_come_from(graphs: dict[str, Any]) -> None:
    """Module and line of the code: for both partitions, and for the nodes between them."""
    lowering = Path(__file__).with_name("lowering.py")
    origins, code = graphs["split"]["origins"], lowering.read_text().splitlines()

    def said(origin: list[str]) -> tuple[str, str]:
        file, _, line = origin[1].partition(":")
        assert file == lowering.name
        return origin[0], code[int(line) - 1].strip()

    first, second = (origins["calls"][call] for call in sorted(origins["calls"], key=int))
    [kernel] = origins["kernels"].values()
    inside, outside = ("gate.0", "return torch.sigmoid(x + 1.0)"), ("", "return torch.relu(self.gate(x) * 2.0)")
    assert said(first["aten_add_tensor"]) == said(kernel) == inside
    assert said(second["aten_mul_tensor"]) == said(second["aten_relu_default"]) == outside


def test_codes_that_a_delegate_would_read_in_another_size_are_seen_going_in_and_coming_out(
    lowered: dict[str, Any],
) -> None:
    wide = ["torch.int32", "torch.uint16"]
    # A toolchain that holds them as QNN does is not refused.
    assert lowered["codes"] == {"16 in 32": [wide, wide], "16 in 16": [[], []], "8 in 8": [[], []]}


def test_a_long_list_of_operators_is_cut() -> None:
    error = DelegationError("lpai", {f"aten.op{n}.default": n + 1 for n in range(9)}, weighted=False)
    assert "aten.op5.default (6 times) and 3 more, and without it lowering fails" in str(error)
    assert len(str(error)) < 400


def test_options_are_decoded_once_and_each_reader_has_its_own(lowered: dict[str, Any]) -> None:
    read = lowered["read options"]
    assert read == {"same": True, "own": True, "socs": [57, 69], "runs": 2, "runs after": 3}
