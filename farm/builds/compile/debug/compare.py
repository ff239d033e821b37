"""Comparison of an executed program's layers with the same layers on the CPU. Imports torch and executorch.

ExecuTorch's Inspector reads the tensors that QNN and the kernels of the CPU wrote. This module dequantizes them, turns
their layout back and computes the figures, in float64, from the two values that a step compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from executorch.backends.qualcomm._passes.layout_transform import LayoutTransform
from executorch.devtools import Inspector
from executorch.exir.sym_util import eval_shape

from farm.builds.compile.debug.compiler import REFERENCE_GRAPH, DebugProgram, LayerNode, sqnr_db
from farm.builds.compile.debug.protocol import Written
from farm.builds.program.layers import Gap, Layer, LayerStep

# QNN's name of a tensor: the node that computes it, and the number of the node's output.
_WRITTEN = re.compile(r"(?:output_(?:mutbuf_\d+_)?)?(?P<node>.+)@(?P<output>\d+)")
_KERNEL = "native_call_"


class _Ran(NamedTuple):
    """Tensors of an execution, dequantized and in torch's layout, by the names of layers."""

    values: dict[str, torch.Tensor]
    names: dict[str, tuple[str, ...]]
    """Names of the events that wrote each layer."""


def compare_layers(program: DebugProgram, simulator: Written, device: Written | None) -> tuple[Layer, ...]:
    """Return every layer, in the order of execution, with the gaps of the steps whose two values are known."""
    simulated = _ran(program, simulator)
    measured = _ran(program, device) if device else _Ran({}, {})
    layers = []
    for node in program.nodes:
        layer, gaps = node.layer, dict[LayerStep, Gap | None]()
        reference = fp32 = program.fp32.layers.get(node.value)
        if program.quantized is not None:
            reference = program.quantized.layers.get(node.value)
            gaps[LayerStep.QUANTIZATION] = _gap(layer, fp32, reference, of_steps=False)
        ran = simulated.values.get(layer.name)
        gaps[LayerStep.COMPILER] = _gap(layer, reference, ran)
        gaps[LayerStep.DEVICE] = _gap(layer, ran, measured.values.get(layer.name))
        layers.append(
            msgspec.structs.replace(
                layer,
                gaps={step: gap for step, gap in gaps.items() if gap is not None},
                inspector=_gap(layer, program.inspected.layers.get(node.value), ran),
                ran=measured.names.get(layer.name) or simulated.names.get(layer.name, ()),
            )
        )
    return tuple(layers)


def missing_layers(layers: tuple[Layer, ...]) -> list[str]:
    """Return the layers without a written tensor."""
    return [layer.name for layer in layers if layer.tensor.handle is not None and LayerStep.COMPILER not in layer.gaps]


def _ran(program: DebugProgram, written: Written) -> _Ran:
    inspector = Inspector(
        etdump_path=written.etdump,
        debug_buffer_path=written.outputs,
        etrecord=str(program.etrecord),
        reference_graph_name=REFERENCE_GRAPH,
    )
    values: dict[str, torch.Tensor] = {}
    names: dict[str, tuple[str, ...]] = {}
    events = [event for block in inspector.event_blocks for event in block.events]
    for layer, name, value in _written_by(program.nodes, events):
        names[layer.name] = tuple(dict.fromkeys((*names.get(layer.name, ()), name)))
        if isinstance(value, torch.Tensor):
            values[layer.name] = value
    return _Ran(values, names)


def _written_by(nodes: Sequence[LayerNode], events: Sequence[Any]) -> Iterator[tuple[Layer, str, Any]]:
    """Yield each layer that an event wrote, with the event's name and the value.

    ExecuTorch 1.5 leaves operators with several outputs out of its map from names to handles. QNN still writes them, as
    `aten_topk_default@1`, and outputs of the delegate as `output_aten_topk_default@1`.
    """
    delegated = [node for node in nodes if node.layer.tensor.partition is not None]
    by_place = {(node.node, node.layer.tensor.output or 0): node for node in delegated}
    on_cpu = [node.layer for node in nodes if node.layer.tensor.partition is None]
    for event in events:
        if event.is_delegated_op:
            identifier = str(event.delegate_debug_identifier)
            match = _WRITTEN.fullmatch(identifier)
            written = by_place.get((match["node"], int(match["output"]))) if match else None
            if written is not None and event.debug_data:
                yield written.layer, identifier, _in_torch_layout(written, event.debug_data[-1])
        elif isinstance(event.debug_handles, int) and event.name.startswith(_KERNEL):
            for layer in on_cpu:
                # The handle of a kernel with another name is from a later pass of ExecuTorch.
                output, is_same = layer.tensor.output or 0, layer.tensor.handle == event.debug_handles
                if is_same and _is_kernel_of(event.name, layer.operator) and output < len(event.debug_data):
                    yield layer, event.name, event.debug_data[output]


def _is_kernel_of(event: str, operator: str) -> bool:
    """Return whether `native_call_erf.out` computes `aten.erf.default`."""
    return "." in operator and event.removeprefix(_KERNEL).split(".")[0] == operator.split(".")[1]


def _in_torch_layout(node: LayerNode, value: Any) -> Any:
    """Return an output of QNN dequantized and in torch's layout, as comparators of ExecuTorch's Inspector do."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor = node.layer.tensor
    if tensor.scale is not None:
        value = (value.to(torch.float32) - (tensor.zero_point or 0)) * tensor.scale
    if node.axis_order:
        value = value.permute(LayoutTransform.get_axis_order(eval_shape(value.shape), reverse=True))
    return value


def _gap(layer: Layer, before: torch.Tensor | None, after: torch.Tensor | None, *, of_steps: bool = True) -> Gap | None:
    """Return the distance of `after` from `before`, with `of_steps` in quantization steps as well.

    None if a value is unknown or the shapes differ.
    """
    if before is None or after is None or before.shape != after.shape:
        return None
    a, b = before.detach().double(), after.detach().double()
    if problem := _problem(a, b):
        finite = bool(torch.isfinite(b).all() and torch.isfinite(a).all())
        mse = float(torch.mean((a - b) ** 2)) if finite else math.inf
        return Gap(mse, -math.inf, None, None, problem)
    numbers = torch.isfinite(a)
    a, b = a[numbers], b[numbers]
    if torch.equal(a, b):
        return Gap(0.0, math.inf, 1.0, 0.0)
    scale = layer.tensor.scale if of_steps else None
    steps = float((a - b).abs().max()) / scale if scale else None
    return Gap(float(torch.mean((a - b) ** 2)), sqnr_db(a, b), cosine(a, b), steps)


def cosine(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the cosine of two float64 tensors; None with a zero tensor among them."""
    norms = math.sqrt(float((before**2).sum())) * math.sqrt(float((after**2).sum()))
    return max(-1.0, min(1.0, float((before * after).sum()) / norms)) if norms else None


def _problem(before: torch.Tensor, after: torch.Tensor) -> str:
    same = (after == before) | (after.isnan() & before.isnan())
    nan, infinite = int((after.isnan() & ~same).sum()), int((after.isinf() & ~same).sum())
    if nan or infinite:
        return f"has {nan} NaN and {infinite} infinite elements where there are numbers before"
    if lost := int((~before.isfinite() & ~same).sum()):
        return f"has numbers where {lost} elements are NaN or infinite before"
    if (
        after.numel() > 1
        and bool((after == after.flatten()[0]).all())
        and not bool((before == before.flatten()[0]).all())
    ):
        return f"is the constant {float(after.flatten()[0]):.6g}"
    return ""
