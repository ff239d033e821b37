"""Graphs of torch whose code is generated late, and whose records of origins are shared."""

from __future__ import annotations

import math
from typing import Any

import pytest


def test_code_is_generated_when_it_is_read_and_not_before(lowered: dict[str, Any]) -> None:
    late = lowered["late code"]
    assert (late["before it is read"], late["relu"], late["printed"]) == (0, True, True)
    assert late["signature"] == ["x"]
    # Once for each state of the graph that was read.
    assert late["generated"] == 2


def test_an_edited_graph_has_its_new_code_once_it_is_recompiled(lowered: dict[str, Any]) -> None:
    late = lowered["late code"]
    sigmoids = [1 / (1 + math.exp(-one)) for one in (1.0, -1.0)]
    assert [late[name][0] for name in ("generated code", "edited")] == pytest.approx(sigmoids)


def test_a_module_outlives_the_change_to_torch_which_is_taken_back(lowered: dict[str, Any]) -> None:
    late = lowered["late code"]
    assert late["outlives"] == [late["edited"]] * 2
    assert late["afterwards"] == 1


def test_copies_share_an_origin_while_a_job_is_compiled(lowered: dict[str, Any]) -> None:
    assert lowered["shared origins"] == {"inside": True, "after": False, "equal": True}
