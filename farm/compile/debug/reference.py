"""Every layer of an edge program on the CPU, in FP32 and quantized. Imports torch and executorch.

ExecuTorch 1.5 folds quantize and dequantize away before it keeps the graph that its Inspector compares with: that graph
computes with quantized weights and activations in floating point, which is neither of the two. What it folded is kept
in the nodes (AnnotateQuantAttrs), so that both can be had from it:

* FP32: the weights that the quantizer saw stand in for those that it quantized;
* quantized: what a node gives is quantized and dequantized as its node says, and once more where a reader wants it
  otherwise (QCOM_REQUANTIZE). QNN gets the same.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from executorch.backends.qualcomm.builders.node_visitor import dq_ops, q_ops
from executorch.backends.qualcomm.utils.constants import (
    QCOM_BYPASS_NODE,
    QCOM_DTYPE,
    QCOM_QUANT_ATTRS,
    QCOM_QUANT_MAX,
    QCOM_QUANT_MIN,
    QCOM_REQUANTIZE,
    QCOM_SCALE,
    QCOM_ZERO_POINT,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Computed(NamedTuple):
    """What one run over the graph gave."""

    layers: dict[str, torch.Tensor]
    """By node; of an operator with several outputs, the first. Inputs of the program are among them."""
    outputs: tuple[torch.Tensor, ...]


class LayerNode(NamedTuple):
    """A node that computes something, or an input of the program."""

    name: str
    operator: str
    handle: int | None
    """ExecuTorch's debug handle; None for an input of the program."""
    scale: float | None
    """Of its quantization, one for the whole tensor; None where there is none."""
    inputs: tuple[str, ...]
    """The layers that it reads, those that only pick one of several outputs left out."""


def layer_nodes(graph: torch.fx.Graph) -> list[LayerNode]:
    """Return the layers of an unlifted edge graph in the order of execution, its inputs first."""
    sources: dict[torch.fx.Node, str] = {}
    found = []
    for node in graph.nodes:
        read = dict.fromkeys(sources[each] for each in node.all_input_nodes if each in sources)
        if node.op == "placeholder":
            sources[node] = node.name
            found.append(LayerNode(node.name, "", None, _scale(node), ()))
        elif node.op != "call_function" or node.meta.get(QCOM_BYPASS_NODE):
            continue  # bypassed is what only unpacks a weight
        elif node.target is operator.getitem:
            sources[node] = next(iter(read))
        else:
            sources[node] = node.name
            found.append(
                LayerNode(node.name, _operator(node), node.meta.get("debug_handle"), _scale(node), tuple(read))
            )
    return found


def run_float(
    module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Computed:
    """Return what the graph computes in FP32; `weights` are the FP32 values of quantized parameters, by their names."""
    return _Layers(module, quantize=False, weights=weights).compute(inputs)


def run_quantized(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Computed:
    """Return what the graph computes with everything quantized as its nodes say."""
    return _Layers(module, quantize=True, weights={}).compute(inputs)


class _Layers(torch.fx.Interpreter):  # type: ignore[misc]
    def __init__(self, module: torch.fx.GraphModule, *, quantize: bool, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._quantize, self._weights = quantize, weights
        self._layers: dict[str, torch.Tensor] = {}

    def compute(self, inputs: Sequence[torch.Tensor]) -> Computed:
        outputs = self.run(*inputs)
        return Computed(self._layers, (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs))

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target in dq_ops and (weight := self._weight(n)) is not None:
            return weight
        value = super().run_node(n)
        if self._quantize and n.op in ("call_function", "placeholder"):
            value = _fake_quantized(value, n.meta.get(QCOM_QUANT_ATTRS))
        shown = value[0] if isinstance(value, (tuple, list)) and value else value
        if n.op in ("call_function", "placeholder") and isinstance(shown, torch.Tensor):
            if shown is not value and self._quantize:
                shown = _fake_quantized(shown, n.meta.get(QCOM_QUANT_ATTRS))
            self._layers[n.name] = shown
        return value

    def map_nodes_to_values(self, args: Any, n: torch.fx.Node) -> Any:
        def load(arg: torch.fx.Node) -> Any:
            value = self.env[arg]
            attributes = arg.meta.get(QCOM_REQUANTIZE, {}).get(n.name) if self._quantize else None
            return _fake_quantized(value, attributes)

        return torch.fx.map_arg(args, load)

    def _weight(self, n: torch.fx.Node) -> torch.Tensor | None:
        source = n.args[0]
        if not isinstance(source, torch.fx.Node) or source.op != "get_attr":
            return None
        weight = self._weights.get(str(source.target))
        if weight is None or weight.shape != self.fetch_attr(str(source.target)).shape:
            return None
        return weight


def _fake_quantized(value: Any, attributes: Mapping[str, Any] | None) -> Any:
    if not attributes or QCOM_SCALE not in attributes or not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value
    arguments = (
        float(attributes[QCOM_SCALE]),
        int(attributes[QCOM_ZERO_POINT]),
        attributes[QCOM_QUANT_MIN],
        attributes[QCOM_QUANT_MAX],
        attributes[QCOM_DTYPE],
    )
    operators = torch.ops.quantized_decomposed
    return operators.dequantize_per_tensor(operators.quantize_per_tensor(value.float(), *arguments), *arguments)


def _scale(node: torch.fx.Node) -> float | None:
    attributes = node.meta.get(QCOM_QUANT_ATTRS) or {}
    return float(attributes[QCOM_SCALE]) if QCOM_SCALE in attributes else None


def _operator(node: torch.fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return "quantize" if node.target in q_ops else name
