"""Exports modules with control flow and prints, by class, the message of their refusal as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from farm.base.errors import ConfigError
from farm.builds.compile.flows.control_flow import refuse_control_flow
from farm.suites.suite import Case, InputSpec


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y - 1.0, (x,))


class Inside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x))


class Loop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y * 2.0), (count, x))[1]


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.where(x.sum() > 0, x * 2.0, x - 1.0)


def refusal(module: torch.nn.Module) -> str:
    """Return the message of the ConfigError; empty without one."""
    exported = torch.export.export(module, (torch.ones(1, 8),), strict=True)
    case = Case("s", "c", ".ops:M", (InputSpec((1, 8)),), folder=str(Path(__file__).parent))
    try:
        refuse_control_flow(exported, case, "htp")
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    # A builder has no folder of a suite in its search path: sources are relative to the folder above the suite.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    sys.stdout.write(json.dumps({module.__name__: refusal(module()) for module in (Branch, Inside, Loop, Plain)}))
