"""Control flow in a module: refused with the function and its line, before anything is quantized or lowered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from farm.base.errors import ConfigError
from farm.builds.compile.flows.qualcomm import refuse_control_flow
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


def refuse(module: torch.nn.Module) -> None:
    exported = torch.export.export(module, (torch.ones(1, 8),), strict=True)
    refuse_control_flow(
        exported, Case("s", "c", ".ops:M", (InputSpec((1, 8)),), folder=str(Path(__file__).parent)), "htp"
    )


@pytest.mark.parametrize(
    ("module", "function", "place", "remedy"),
    [
        (Branch(), "torch.cond", "", "compute both branches and choose one with torch.where"),
        (Inside(), "torch.cond", "module body, ", "compute both branches and choose one with torch.where"),
        (Loop(), "torch.while_loop", "", "write the iterations out"),
    ],
)
def test_control_flow_is_refused_with_its_line(
    monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module, function: str, place: str, remedy: str
) -> None:
    # A builder has no folder of a suite in its search path: sources are relative to the folder above the suite.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(Path(__file__).parent)])
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(number for number, line in lines if f"return {function}(" in line)
    with pytest.raises(ConfigError) as raised:
        refuse(module)
    where = f"{place}compile/torch_control_flow.py:{line}"
    assert f"{function} ({where}) is control flow, which htp does not take: " in str(raised.value)
    assert str(raised.value).endswith(f"{remedy}, or run the case on xnnpack")


def test_a_choice_by_torch_where_is_not_refused() -> None:
    refuse(Plain())
