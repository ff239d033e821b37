"""Figures of layers, in float64: squares that overflow float32, infinities and NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.builds.program.layers import Gap


@pytest.fixture(scope="module")
def figures(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_layer_figures.py."""
    return printed_json(Path(__file__).with_name("made_layer_figures.py"))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20, 1e38])
def test_figures_do_not_depend_on_the_size_of_the_values(figures: dict[str, Any], scale: float) -> None:
    found = Gap(**figures["scales"][str(scale)])
    assert found.sqnr_db == pytest.approx(10 * math.log10(14 / 0.01), rel=1e-4)
    assert found.cosine == pytest.approx(0.9997, abs=1e-3)
    assert found.mse == pytest.approx(0.01 / 3 * scale**2, rel=1e-4)


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("infinite after", "has 0 NaN and 1 infinite elements"),
        ("NaN after", "has 1 NaN and 0 infinite elements"),
        ("another infinity", "has 0 NaN and 1 infinite elements"),
        ("infinite before", "has numbers where 1 elements are NaN or infinite before"),
        ("NaN before", "has numbers where 1 elements are NaN or infinite before"),
    ],
)
def test_infinities_and_nan_are_named(figures: dict[str, Any], pair: str, problem: str) -> None:
    found = Gap(**figures["pairs"][pair])
    assert found.problem.startswith(problem)
    assert found.sqnr_db == -math.inf


def test_a_mask_is_equal_to_itself_and_zeros_have_no_cosine(figures: dict[str, Any]) -> None:
    assert Gap(**figures["pairs"]["mask"]) == Gap(0.0, math.inf, 1.0, 0.0)
    zero = Gap(**figures["pairs"]["zeros"])
    assert (zero.sqnr_db, zero.cosine) == (-math.inf, None)


def test_a_layer_keeps_its_value_when_a_later_operator_writes_to_it(figures: dict[str, Any]) -> None:
    computed = figures["written"]
    assert computed["relu"] == [0.0, 2.0]
    assert computed["outputs"] == [[2.0, 6.0]]
    assert computed["given"] == [-1.0, 2.0]
