"""Checks of a case's inputs when its manifest is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from farm.base.errors import ConfigError
from farm.suites.suite import InputSpec

# Parameters of an input by distribution.
_DRAWN_WITH = {
    "normal": ("scale",),
    "uniform": ("low", "high"),
    "integers": ("low", "high"),
    "linspace": ("low", "high"),
    "arange": (),
    "constant": ("low",),
}


def check_inputs(manifest: Path, key: str, inputs: Sequence[InputSpec], samples: int, *, ready: bool) -> None:
    """Raise ConfigError unless every input can be made for each sample; `ready` for inputs of a `.pte`."""
    if not inputs:
        raise ConfigError(manifest, key, "at least one input is needed")
    for index, spec in enumerate(inputs):
        _check_drawn(manifest, f"{key}[{index}]", spec)
        if spec.shape is None and not spec.files:
            raise ConfigError(manifest, key, "an input has a shape or files")
        if any(size < 1 for size in spec.shape or ()):
            raise ConfigError(manifest, key, "every dimension is at least 1")
        if spec.files and len(spec.files) != samples:
            raise ConfigError(manifest, f"{key}.files", f"are {len(spec.files)}, expected one a sample")
        for size in spec.dynamic:
            if spec.shape is None or not 0 <= size.dim < len(spec.shape):
                raise ConfigError(manifest, f"{key}.dynamic", f"the shape has no dimension {size.dim}")
            if not 1 <= size.least <= spec.shape[size.dim] <= size.greatest:
                problem = f"dimension {size.dim} is {spec.shape[size.dim]}, expected 1 <= least <= it <= greatest"
                raise ConfigError(manifest, f"{key}.dynamic", problem)
    if ready and any(spec.dynamic for spec in inputs):
        raise ConfigError(manifest, f"{key}.dynamic", "a pte knows its bounds: leave it out")


def _check_drawn(manifest: Path, key: str, spec: InputSpec) -> None:
    """Raise ConfigError unless there are values that `spec` can be drawn from."""
    usual, drawn = InputSpec(), f"the distribution {spec.distribution!r}"
    for name in ("low", "high", "scale"):
        value = getattr(spec, name)
        if value != getattr(usual, name) and name not in _DRAWN_WITH[spec.distribution]:
            takes = " and ".join(_DRAWN_WITH[spec.distribution]) or "neither low, high nor scale"
            raise ConfigError(manifest, f"{key}.{name}", f"{drawn} takes {takes}: leave it out")
        if not math.isfinite(value):
            raise ConfigError(manifest, f"{key}.{name}", f"is {value}, expected a finite number")
    if spec.scale < 0:
        raise ConfigError(manifest, f"{key}.scale", f"is {spec.scale:g}, expected at least 0")
    if spec.distribution == "uniform" and spec.low > spec.high:
        raise ConfigError(manifest, f"{key}.low", f"is {spec.low:g}, expected at most high, {spec.high:g}")
    if spec.distribution == "integers" and int(spec.low) >= int(spec.high):
        raise ConfigError(manifest, f"{key}.low", f"is {spec.low:g}, expected a whole number below high, {spec.high:g}")
