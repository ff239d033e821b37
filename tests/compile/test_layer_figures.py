"""Figures of layers, in float64: squares that overflow float32, infinities and NaN."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farm.compile.debug.compare import _Comparators
from farm.compile.debug.reference import run_float
from farm.program.layers import Gap, LayerTensor

NODE: Any = SimpleNamespace(name="add", tensor=LayerTensor())


def gap(before: list[float], after: list[float]) -> Gap:
    comparators = _Comparators(SimpleNamespace(metrics=()))  # type: ignore[arg-type]
    found = comparators.gap(NODE, torch.tensor(before), torch.tensor(after))
    assert found is not None
    return found


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20, 1e38])
def test_figures_do_not_depend_on_the_size_of_the_values(scale: float) -> None:
    found = gap([scale, -2 * scale, 3 * scale], [1.1 * scale, -2 * scale, 3 * scale])
    assert found.sqnr_db == pytest.approx(10 * math.log10(14 / 0.01), rel=1e-4)
    assert found.cosine == pytest.approx(0.9997, abs=1e-3)
    assert found.mse == pytest.approx(0.01 / 3 * scale**2, rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ([1.0, 2.0], [1.0, math.inf], "has 0 NaN and 1 infinite elements"),
        ([1.0, 2.0], [math.nan, 2.0], "has 1 NaN and 0 infinite elements"),
        ([1.0, math.inf], [1.0, -math.inf], "has 0 NaN and 1 infinite elements"),
        ([1.0, math.inf], [1.0, 65504.0], "has numbers where 1 elements are NaN or infinite before"),
        ([1.0, math.nan], [1.0, 0.0], "has numbers where 1 elements are NaN or infinite before"),
    ],
)
def test_infinities_and_nan_are_named(before: list[float], after: list[float], problem: str) -> None:
    found = gap(before, after)
    assert found.problem.startswith(problem)
    assert found.sqnr_db == -math.inf


def test_a_mask_is_equal_to_itself_and_zeros_have_no_cosine() -> None:
    assert gap([-math.inf, 1.0], [-math.inf, 1.0]) == Gap(0.0, math.inf, 1.0, 0.0)
    zero = gap([0.0, 0.0], [0.5, 0.25])
    assert (zero.sqnr_db, zero.cosine) == (-math.inf, None)


def test_a_layer_keeps_its_value_when_a_later_operator_writes_to_it() -> None:
    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.relu()
            y.add_(1.0)
            return y * 2.0

    given = torch.tensor([-1.0, 2.0])
    graph = torch.export.export(Written(), (given,), strict=True).module()
    computed = run_float(graph, (given,), {})
    assert computed.layers["relu"].tolist() == [0.0, 2.0]
    assert [one.tolist() for one in computed.outputs] == [[2.0, 6.0]]
    assert given.tolist() == [-1.0, 2.0]
