"""Calls of a module: a write reaches no other sample, and outputs have names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def called(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_calls.py."""
    return printed_json(Path(__file__).with_name("made_calls.py"))


def test_uniform_inputs_fill_the_range_from_low_to_high(called: dict[str, Any]) -> None:
    least, mean, most = called["uniform"]
    assert 2.0 <= least < 2.1
    assert 3.8 < mean < 4.2
    assert 5.9 < most < 6.0


@pytest.mark.parametrize("forward", ["in_place", "through"])
def test_a_module_that_writes_to_its_input_leaves_the_samples_alone(called: dict[str, Any], forward: str) -> None:
    ran = called["samples"][forward]
    assert ran["given"] == ran["inputs"] == ran["expected"]
    assert [len(sample) for sample in ran["given"]] == [1] * 3
    for given, left in zip(ran["given"], ran["left"], strict=True):
        assert given != left


def test_an_input_that_is_returned_is_no_later_input(called: dict[str, Any]) -> None:
    # `through` returns its input: a second call with the same tensors once began where the first had ended.
    ran = called["samples"]["through"]
    assert len(ran["outputs"]) == 3
    assert ran["outputs"] == ran["outputs again"]


@pytest.mark.parametrize("forward", ["own_buffer", "view_of_buffer"])
def test_a_returned_buffer_is_another_output_in_each_sample(called: dict[str, Any], forward: str) -> None:
    assert len({tuple(one[0]) for one in called["samples"][forward]["outputs"]}) == 3


def test_state_that_is_handed_on_survives_a_later_write(called: dict[str, Any]) -> None:
    ran = called["state"]
    assert [one[1][0] for one in ran["outputs"]] == [1, 2, 3]
    assert [one[1][0] for one in ran["inputs"]] == [0, 1, 2]


def test_the_writes_of_a_reference_are_seen_by_name(called: dict[str, Any]) -> None:
    found = called["writes"]["view_of_buffer"]
    assert (found["inputs"], found["buffers"], found["is_changed"]) == ([], ["c"], True)
    found = called["writes"]["in_place"]
    assert found["named"] == ["input x"]
    assert not found["is_changed"]


def test_a_buffer_that_is_replaced_or_written_past_its_version_is_a_write(called: dict[str, Any]) -> None:
    for forward in ("replaces", "past its version"):
        assert called["writes"][forward]["buffers"] == ["c"]


def test_a_parameter_that_is_written_past_its_version_is_refused(called: dict[str, Any]) -> None:
    for forward in ("past its version", "transposed"):
        assert "forward writes to its parameter weight: " in called["parameters"][forward]


@pytest.mark.parametrize("kept", ["a tensor", "an array"])
def test_an_attribute_that_is_written_in_place_changes_the_module(called: dict[str, Any], kept: str) -> None:
    assert called["attributes"][kept] == {"written": True, "read": False}


def test_a_buffer_of_nan_that_stays_is_no_write(called: dict[str, Any]) -> None:
    assert not called["writes"]["nan"]["buffers"]


def test_what_a_module_counts_changes_it(called: dict[str, Any]) -> None:
    assert called["counts"] == {"run": True, "later": False}


def test_a_module_that_writes_to_a_parameter_is_refused(called: dict[str, Any]) -> None:
    problem = r"suite.toml: case\.one\.module: forward writes to its parameter weight: "
    assert re.search(problem, called["parameters"]["grows"])


def test_a_graph_begins_again_where_it_began(called: dict[str, Any]) -> None:
    assert called["graph"] == [0.0] * 4


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ("a tensor", [""]),
        ("a tuple", ["", ""]),
        ("a dict", ["out", "aux"]),
        ("a list in a tuple", ["[0]", "[1].0", "[1].1"]),
        ("a dict in a list", ["[0].boxes", "[1]"]),
        ("a typed named tuple", ["left", "right.0", "right.1"]),
        ("a named tuple", ["boxes"]),
        ("a dict in a dict", ["pyramid.p3", "pyramid.p4.0"]),
    ],
)
def test_outputs_have_the_paths_of_what_the_module_returns(
    called: dict[str, Any], outputs: str, names: list[str]
) -> None:
    assert called["names"][outputs] == {"names": names, "flat": len(names)}


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ("None", "forward returns None, expected tensors alone"),
        ("a None", r"forward returns None in output \[1\], expected"),
        ("a count", "forward returns 3 in output count, expected"),
        ("a number", r"forward returns 0\.5 in output \[1\]"),
        ("a bool", r"forward returns True in output \[1\]\.1"),
        ("a text", r"forward returns a str in output \[1\]"),
        ("nothing", "forward returns no tensor"),
    ],
)
def test_what_is_no_tensor_is_refused_in_one_line(called: dict[str, Any], outputs: str, problem: str) -> None:
    output = called["refused"][outputs]
    assert re.search(rf"suite\.toml: case\.one\.module: {problem}", output)
    assert "\n" not in output


def test_names_of_outputs_are_one_line_and_none_is_anothers(called: dict[str, Any]) -> None:
    names = called["names"]["odd keys"]["names"]
    assert len(set(names)) == 6
    assert names == ["['a.b']", "a.b", "['two\\nlines']", "['[0]']", "['']", "['with blank'].0"]
