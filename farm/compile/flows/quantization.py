"""What quantization did to a graph. Imports torch."""

from __future__ import annotations

import operator

import torch

_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


def output_steps(quantized: torch.fx.GraphModule) -> tuple[float | None, ...]:
    """Return the quantization step of every output of a converted graph, in the unit of the output.

    None for one that is not quantized, or not with one scale for the whole tensor.
    """
    [end] = [node for node in quantized.graph.nodes if node.op == "output"]
    returned, _ = torch.utils._pytree.tree_flatten(end.args[0])  # noqa: SLF001 - torch has no public name for it
    return tuple(_step(node) for node in returned)


def _step(node: object) -> float | None:
    while isinstance(node, torch.fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    if isinstance(node, torch.fx.Node) and str(node.target) == _DEQUANTIZE:
        scale = node.args[1]
        return float(scale) if isinstance(scale, float) else None
    return None
