"""Composite operators of an export: their lists, with one look at the dispatcher for each, and their kernels."""

from __future__ import annotations

from typing import Any


def test_a_list_is_the_same_after_one_look(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["same"]
    assert lowered["composite"]["looks"] == 1


def test_what_is_registered_between_two_lists_is_in_the_second(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["new"] == ["farm_test::double"]


def test_afterwards_torch_is_as_it_was(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["looks after"] > 1


def test_cached_kernels_are_those_of_torch(lowered: dict[str, Any]) -> None:
    kernels = lowered["kernels"]
    assert kernels["first"] == kernels["torch"] == kernels["again"]
    assert all(len(one) > 20 for one in kernels["again"]["kernels"])
    assert kernels["again"]["own"] == kernels["again"]["left"] == [True, True]


def test_a_kernel_that_is_registered_between_two_overrides_stays(lowered: dict[str, Any]) -> None:
    assert lowered["kernels"]["changed"] == {"inside": True, "after": True}
