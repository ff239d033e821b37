"""Layers of a program, computed in several ways: reply of the compiler process, and input of the judgement."""

from __future__ import annotations

from enum import StrEnum

import msgspec

INPUT = "input"
"""Operator of a layer that is an input of the program."""


class LayerStep(StrEnum):
    """Step between two ways of computing the same layer, in the order of the steps."""

    QUANTIZATION = "quantization"
    """Step from the FP32 module to the quantized module, both on the CPU."""
    COMPILER = "compiler"
    """Step from the quantized module on the CPU to the compiled program on the simulator."""
    DEVICE = "device"
    """Step from the simulator to a device, both with the compiled program."""


class Gap(msgspec.Struct, frozen=True):
    """Distance between two ways of computing a layer; a metric without a value is None."""

    mse: float | None
    sqnr_db: float | None
    """SQNR; inf for equal values."""
    cosine: float | None
    steps: float | None = None
    """Greatest difference in steps of the layer's quantization; None for a layer without quantization."""
    problem: str = ""
    """Reason why the value cannot be compared: `has 3 NaN`, `is the constant 0`."""


class LayerTensor(msgspec.Struct, frozen=True):
    """Output tensor of a layer: its place in ExecuTorch's files, its shape and its type."""

    handle: int | None = None
    """ExecuTorch's debug handle; None for an input of the program."""
    output: int | None = None
    """Number of the output of its operator; None for an operator with a single output."""
    partition: int | None = None
    """Number of the delegate that computes it, in the order of execution; None on the CPU."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Type of the codes of a quantized tensor (`uint8`, `uint16`), else of the values: `float32`."""
    scale: float | None = None
    """Scale of its quantization, for the whole tensor; None without quantization."""
    zero_point: int | None = None


class Layer(msgspec.Struct, frozen=True):
    """Layer with its gaps and its origin."""

    name: str
    """Node of the edge graph: `aten_convolution_default_1`; with several used outputs `aten_topk_default:1`."""
    operator: str
    """`aten.convolution.default`; INPUT for an input of the program."""
    inputs: tuple[str, ...]
    """Names of the layers that it reads."""
    gaps: dict[LayerStep, Gap]
    """Gaps of the steps whose two values are known; empty for a layer without a written tensor."""
    inspector: Gap | None = None
    """Gap between the simulator and ExecuTorch's own reference, as its Inspector reports it: quantized weights, but
    activations in floating point."""
    tensor: LayerTensor = LayerTensor()
    module: str = ""
    """Path of its module in the model: `layers.3.conv`; empty for the model itself, and for an unknown module."""
    source: str = ""
    """Line of the model's code: `models/text.py:42`; empty for an unknown line."""
    exported: tuple[str, ...] = ()
    """Operators of the exported program from which it comes, ahead of time: `aten.conv2d.default`."""
    ran: tuple[str, ...] = ()
    """Names of the events that wrote it at run time: `aten_convolution_default@0`, `native_call_erf.out`; empty for a
    layer that is fused into others."""
