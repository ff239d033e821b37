"""Toolchains that shortcuts were tried with. Imports torch."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Releases of torch 2.13, of ExecuTorch 1.5.1, and no development versions, such as 2.13.0a0+git1234567.
_TORCH = re.compile(r"2\.13\.\d+(\+(cpu|cu\d+))?")


def is_tried(version: str = str(torch.__version__)) -> bool:
    """Return whether shortcuts that replace functions of torch were tried with a version of torch."""
    return _TORCH.fullmatch(version) is not None


def has_parameters(function: Callable[..., Any], *names: str) -> bool:
    """Return whether `function` takes the parameters `names`, in this order and no others."""
    return tuple(inspect.signature(function).parameters) == names
