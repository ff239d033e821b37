"""Compares layers of a few numbers before and after a step, and prints the figures as JSON."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from farm.builds.compile.debug.compare import _gap
from farm.builds.compile.debug.reference import run_float
from farm.builds.program.layers import LayerTensor

NODE: Any = SimpleNamespace(name="add", tensor=LayerTensor())
SCALES = (1e-30, 1.0, 1e20, 1e38)
PAIRS = {
    "infinite after": ([1.0, 2.0], [1.0, math.inf]),
    "NaN after": ([1.0, 2.0], [math.nan, 2.0]),
    "another infinity": ([1.0, math.inf], [1.0, -math.inf]),
    "infinite before": ([1.0, math.inf], [1.0, 65504.0]),
    "NaN before": ([1.0, math.nan], [1.0, 0.0]),
    "mask": ([-math.inf, 1.0], [-math.inf, 1.0]),
    "zeros": ([0.0, 0.0], [0.5, 0.25]),
}


def gap(before: list[float], after: list[float]) -> dict[str, Any]:
    found = _gap((), NODE, torch.tensor(before), torch.tensor(after))
    assert found is not None
    return msgspec.structs.asdict(found)


class Written(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        y.add_(1.0)
        return y * 2.0


def written() -> dict[str, object]:
    given = torch.tensor([-1.0, 2.0])
    graph = torch.export.export(Written(), (given,), strict=True).module()
    computed = run_float(graph, (given,), {})
    outputs = [one.tolist() for one in computed.outputs]
    return {"relu": computed.layers["relu"].tolist(), "outputs": outputs, "given": given.tolist()}


if __name__ == "__main__":
    scaled = {str(one): gap([one, -2 * one, 3 * one], [1.1 * one, -2 * one, 3 * one]) for one in SCALES}
    pairs = {name: gap(before, after) for name, (before, after) in PAIRS.items()}
    sys.stdout.write(json.dumps({"scales": scaled, "pairs": pairs, "written": written()}))
