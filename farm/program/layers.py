"""One layer of a program, computed in several ways: what the process that has torch tells, and what is judged."""

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


class Layer(msgspec.Struct, frozen=True):
    """One layer and what is known of it."""

    name: str
    """Node of the edge graph: `aten_convolution_default_1`."""
    operator: str
    """`aten.convolution.default`; INPUT for an input of the program."""
    inputs: tuple[str, ...]
    """Names of the layers that it reads."""
    gaps: dict[LayerStep, Gap]
    """Only the steps of which both ways are known; none where nothing was written of it."""
    inspector: Gap | None = None
    """The simulator against ExecuTorch's own reference, as its Inspector reports it: quantized weights, but
    activations in floating point."""
