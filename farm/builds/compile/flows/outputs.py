"""Outputs of a module as the manifest of its bundle describes them. Imports torch."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import msgspec
import torch

from farm.builds.bundles.bundle import TensorSpec
from farm.builds.compile.flows.calls import returned_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.builds.compile.flows.calls import Tensors
    from farm.builds.compile.flows.writes import Reference
    from farm.builds.program.layout import Order

_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


def tensor_spec(tensor: torch.Tensor, step: float | None = None, order: Order = ()) -> TensorSpec:
    """Return a tensor as a manifest describes it."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), step, order)


def named_outputs(
    reference: Reference, tensors: Tensors, written: Sequence[int], steps: Sequence[float | None]
) -> list[TensorSpec]:
    """Return the outputs of a program as in a manifest: `tensors`, which begin with the inputs `written`."""
    names = [
        *((reference.input_names[place], None) for place in written),
        *zip(reference.run.names, steps, strict=True),
    ]
    return [
        msgspec.structs.replace(tensor_spec(tensor, step), name=name, written=number < len(written))
        for number, (tensor, (name, step)) in enumerate(zip(tensors, names, strict=True))
    ]


def output_steps(quantized: torch.fx.GraphModule) -> tuple[float | None, ...]:
    """Return the quantization step of every output of a converted graph, in the unit of the output.

    None for an output without quantization, or without one scale for the whole tensor.
    """
    return tuple(map(_step_of, returned_nodes(quantized.graph)))


def _step_of(node: object) -> float | None:
    while isinstance(node, torch.fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    if isinstance(node, torch.fx.Node) and str(node.target) == _DEQUANTIZE:
        scale = node.args[1]
        return float(scale) if isinstance(scale, float) else None
    return None
