"""Modules of torch, each made of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def module_of(forward: Callable[..., Any], **parts: Any) -> torch.nn.Module:
    """Return a module in eval mode with a function as `forward`, and with these attributes."""
    made = type("Made", (torch.nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made.eval()


def buffer_of(*values: float) -> torch.nn.Buffer:
    """Return a buffer for a module."""
    return torch.nn.Buffer(torch.tensor(values))
