"""The lists of composite operators that torch makes for an export, with one look at the dispatcher for each."""

from __future__ import annotations

from typing import Any


def test_a_list_is_the_same_after_one_look(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["same"]
    assert lowered["composite"]["looks"] == 1


def test_what_is_registered_between_two_lists_is_in_the_second(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["new"] == ["farm_test::double"]


def test_afterwards_torch_is_as_it_was(lowered: dict[str, Any]) -> None:
    assert lowered["composite"]["looks after"] > 1
