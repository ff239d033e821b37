"""The layers of a program that ran, against the same layers on the CPU. Imports torch and executorch.

ExecuTorch's Inspector finds the debug handle of every tensor that QNN wrote, its Qualcomm comparators dequantize and
turn the layout back, and compute the figures. What is added here is which two values are compared.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import torch
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base import QcomNumericalComparatorBase
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_sample import (
    QcomCosineSimilarityComparator,
    QcomMSEComparator,
)
from executorch.devtools import Inspector
from torchao.quantization.utils import compute_error

from farm.compile.debug.compiler import REFERENCE_GRAPH
from farm.program.layers import INPUT, Gap, Layer, LayerStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.export import ExportedProgram

    from farm.compile.debug.compiler import DebugProgram
    from farm.compile.debug.protocol import Written


class _Collector(QcomNumericalComparatorBase):  # type: ignore[misc]
    """Keeps what a comparator is given: what ran, dequantized and in torch's layout, and ExecuTorch's reference."""

    def __init__(self, edge_ep: ExportedProgram) -> None:
        super().__init__(edge_ep)
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def metric_name(self) -> str:
        return "none"

    def is_valid_score(self, score: float) -> bool:
        return not math.isnan(score)

    def element_compare(self, a: Any, b: Any) -> float:
        return float(a is not b)

    def compare(self, mapping: Any, *names: Any) -> pd.DataFrame:
        del names
        for (handle, reference), (_, value) in self._processed(mapping):
            pair = _first(reference), _first(value)
            if len(handle) == 1 and all(isinstance(each, torch.Tensor) for each in pair):
                self.pairs[handle[0]] = pair
        return pd.DataFrame()

    def _processed(self, mapping: Any) -> list[Any]:
        try:
            return list(self.preprocessing(mapping).items())
        except AssertionError:
            # One tensor whose shape QNN changed, [] into [1], would keep all others from being compared.
            found = []
            for key, value in mapping.items():
                with contextlib.suppress(AssertionError):
                    found += self.preprocessing({key: value}).items()
            return found


def compare_layers(program: DebugProgram, simulator: Written, device: Written | None) -> tuple[Layer, ...]:
    """Return every layer, in the order of execution, with the gaps of the steps of which both ways are known."""
    simulated = _ran(program, simulator)
    measured = _ran(program, device) if device else {}
    figures = _Comparators(program.edge)
    rows = []
    for node in program.nodes:
        gaps: dict[LayerStep, Gap] = {}
        reference = fp32 = program.fp32.layers.get(node.name)
        if program.quantized is not None:
            reference = program.quantized.layers.get(node.name)
            _put(gaps, LayerStep.QUANTIZATION, figures.gap(fp32, reference, None))
        handle = node.handle if node.handle is not None else -1
        inspector, ran = simulated.get(handle, (None, None))
        _, hardware = measured.get(handle, (None, None))
        _put(gaps, LayerStep.COMPILER, figures.gap(reference, ran, node.scale))
        _put(gaps, LayerStep.DEVICE, figures.gap(ran, hardware, node.scale))
        rows.append(
            Layer(node.name, node.operator or INPUT, node.inputs, gaps, figures.gap(inspector, ran, node.scale))
        )
    return tuple(rows)


def missing_layers(program: DebugProgram, layers: tuple[Layer, ...]) -> list[str]:
    """Return the operators of which nothing was written: on the CPU, fused by QNN, or with several outputs."""
    seen = {layer.name for layer in layers if LayerStep.COMPILER in layer.gaps}
    return [node.name for node in program.nodes if node.handle is not None and node.name not in seen]


def _ran(program: DebugProgram, written: Written) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return ExecuTorch's reference and what ran, by debug handle."""
    inspector = Inspector(
        etdump_path=written.etdump,
        debug_buffer_path=written.outputs,
        etrecord=str(program.etrecord),
        reference_graph_name=REFERENCE_GRAPH,
    )
    for block in inspector.event_blocks:
        # What the CPU runs beside a delegate has handles of its own count, which are those of other layers.
        block.events = [event for event in block.events if event.is_delegated_op]
        for event in block.events:
            # The Inspector of ExecuTorch 1.5 takes a delegate to have as many outputs at each of its nodes as it has in
            # all, and fails over a program with two. QNN writes one tensor an event.
            event.num_outputs = 1
    collector = _Collector(program.edge)
    inspector.calculate_numeric_gap(distance=collector, reference_graph=REFERENCE_GRAPH)
    return collector.pairs


class _Comparators:
    def __init__(self, edge: ExportedProgram) -> None:
        self._mse = QcomMSEComparator(edge_ep=edge)
        self._cosine = QcomCosineSimilarityComparator(edge_ep=edge)

    def gap(self, before: torch.Tensor | None, after: torch.Tensor | None, scale: float | None) -> Gap | None:
        """Return how far `after` is from `before`; None where one of them is not known."""
        if before is None or after is None or before.shape != after.shape:
            return None
        a, b = before.detach().float(), after.detach().float()
        if problem := _problem(a, b):
            finite = bool(torch.isfinite(b).all())
            mse = float(torch.mean((a - b) ** 2)) if finite else math.inf
            return Gap(_number(mse), -math.inf, None, None, problem)
        if torch.equal(a, b):
            return Gap(0.0, math.inf, 1.0, 0.0)
        return Gap(
            _number(self._mse.element_compare(a, b)),
            # What ExecuTorch's comparator for it calls, which 1.3 does not have.
            _number(float(compute_error(a, b))),
            _number(self._cosine.element_compare(a, b)),
            _number(float((a - b).abs().max()) / scale) if scale else None,
        )


def _number(value: float) -> float | None:
    """Return a figure; None for NaN."""
    return None if math.isnan(value) else value


def _problem(before: torch.Tensor, after: torch.Tensor) -> str:
    nan = int((after.isnan() & ~before.isnan()).sum())
    infinite = int((after.isinf() & before.isfinite()).sum())
    if nan or infinite:
        return f"has {nan} NaN and {infinite} infinite elements where there are numbers before"
    if (
        after.numel() > 1
        and bool((after == after.flatten()[0]).all())
        and not bool((before == before.flatten()[0]).all())
    ):
        return f"is the constant {float(after.flatten()[0]):.6g}"
    return ""


def _put(gaps: dict[LayerStep, Gap], step: LayerStep, gap: Gap | None) -> None:
    if gap is not None:
        gaps[step] = gap


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and value else value
