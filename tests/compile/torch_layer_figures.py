"""Figures of layers, in float64: squares that overflow float32, infinities and NaN."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farm.builds.compile.debug.compare import _gap
from farm.builds.compile.debug.reference import run_float
from farm.builds.program.layers import Gap, LayerTensor

INF, NAN = math.inf, math.nan


def gap(before: list[float], after: list[float]) -> Gap:
    node: Any = SimpleNamespace(name="add", tensor=LayerTensor())
    found = _gap((), node, torch.tensor(before), torch.tensor(after))
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
        ([1.0, 2.0], [1.0, INF], "has 0 NaN and 1 infinite elements"),
        ([1.0, 2.0], [NAN, 2.0], "has 1 NaN and 0 infinite elements"),
        ([1.0, INF], [1.0, -INF], "has 0 NaN and 1 infinite elements"),
        ([1.0, INF], [1.0, 65504.0], "has numbers where 1 elements are NaN or infinite before"),
        ([1.0, NAN], [1.0, 0.0], "has numbers where 1 elements are NaN or infinite before"),
    ],
)
def test_infinities_and_nan_are_named(before: list[float], after: list[float], problem: str) -> None:
    found = gap(before, after)
    assert found.problem.startswith(problem)
    assert found.sqnr_db == -INF


def test_a_mask_is_equal_to_itself_and_zeros_have_no_cosine() -> None:
    assert gap([-INF, 1.0], [-INF, 1.0]) == Gap(0.0, INF, 1.0, 0.0)
    zero = gap([0.0, 0.0], [0.5, 0.25])
    assert (zero.sqnr_db, zero.cosine) == (-INF, None)


class Written(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        y.add_(1.0)
        return y * 2.0


def test_a_layer_keeps_its_value_when_a_later_operator_writes_to_it() -> None:
    given = torch.tensor([-1.0, 2.0])
    computed = run_float(torch.export.export(Written(), (given,), strict=True).module(), (given,), {})
    assert computed.layers["relu"].tolist() == [0.0, 2.0]
    assert [one.tolist() for one in computed.outputs] == [[2.0, 6.0]]
    assert given.tolist() == [-1.0, 2.0]
