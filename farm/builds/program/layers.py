"""One layer of a program, computed in several ways: what the process that has torch replies, and what is judged."""

from __future__ import annotations

from enum import StrEnum

import msgspec

INPUT = "input"
"""What a layer that is an input of the program has as its operator."""


class LayerStep(StrEnum):
    """What lies between two ways of computing the same layer, in the order in which they are taken."""

    QUANTIZATION = "quantization"
    """The FP32 module and the quantized module, both on the CPU."""
    COMPILER = "compiler"
    """The quantized module on the CPU, and the compiled program on the simulator."""
    DEVICE = "device"
    """The compiled program on the simulator and on a device."""


class Score(msgspec.Struct, frozen=True):
    """What a comparator of the user's says of two ways of computing a layer."""

    value: float
    valid: bool | None
    """None where the comparator has no threshold."""


class Gap(msgspec.Struct, frozen=True):
    """How far one way of computing a layer is from the way before it. None: has no value."""

    mse: float | None
    sqnr_db: float | None
    """inf where both are equal."""
    cosine: float | None
    steps: float | None = None
    """Greatest difference in steps of the layer's quantization; None where it has none."""
    problem: str = ""
    """Why the value cannot be compared: `has 3 NaN`, `is the constant 0`."""
    scores: dict[str, Score] = {}
    """By the name of the comparator of the user's; none where there is no value to compare."""


class LayerTensor(msgspec.Struct, frozen=True):
    """What a layer gives: where ExecuTorch's files have it, and how its numbers are written."""

    handle: int | None = None
    """ExecuTorch's debug handle; None for an input of the program."""
    output: int | None = None
    """Which output of its operator; None where that has one."""
    partition: int | None = None
    """Which delegate of the program computes it, in the order of execution; None on the CPU."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """`uint8`, `uint16` where it is quantized, else of the value: `float32`."""
    scale: float | None = None
    """Of its quantization, one for the whole tensor; None where there is none."""
    zero_point: int | None = None


class Layer(msgspec.Struct, frozen=True):
    """One layer and what is known of it."""

    name: str
    """Node of the edge graph: `aten_convolution_default_1`; `aten_topk_default:1` where several outputs are used."""
    operator: str
    """`aten.convolution.default`; INPUT for an input of the program."""
    inputs: tuple[str, ...]
    """Names of the layers that it reads."""
    gaps: dict[LayerStep, Gap]
    """Only the steps of which both ways are known; none where nothing was written of it."""
    inspector: Gap | None = None
    """The simulator against ExecuTorch's own reference, as its Inspector reports it: quantized weights, but
    activations in floating point."""
    tensor: LayerTensor = LayerTensor()
    module: str = ""
    """Path of its module in the model: `layers.3.conv`; empty for the model itself, and where that is not known."""
    source: str = ""
    """Line of the model's code: `models/text.py:42`; empty where it is not known."""
    exported: tuple[str, ...] = ()
    """Operators of the exported program that it comes from, ahead of time: `aten.conv2d.default`."""
    ran: tuple[str, ...] = ()
    """Names of what wrote it at run time: `aten_convolution_default@0`, `native_call_erf.out`; none where it is fused
    into others."""
