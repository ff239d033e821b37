"""Control flow in a module: refused with the function and its line, before anything is quantized or lowered."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from farm.compile.flows.control_flow import refuse_control_flow
from farm.errors import ConfigError
from farm.suites.suite import Case, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable


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


def line_of(module: Callable[..., torch.nn.Module], text: str) -> int:
    lines, start = inspect.getsourcelines(module)
    return next(start + number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("module", "of_line", "place"),
    [(Branch, Branch, ""), (Inside, Branch, "module body, ")],
)
def test_torch_cond_is_refused_with_its_line(
    module: type[torch.nn.Module], of_line: type[torch.nn.Module], place: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse(module())
    line = line_of(of_line, "torch.cond")
    said = f"torch.cond ({place}compile/test_control_flow.py:{line}) is control flow, which htp does not take: "
    assert said in str(raised.value)
    assert str(raised.value).endswith(
        "compute both branches and choose one with torch.where, or run the case on xnnpack"
    )


def test_a_loop_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse(Loop())
    assert f"torch.while_loop (compile/test_control_flow.py:{line_of(Loop, 'torch.while_loop')})" in str(raised.value)
    assert str(raised.value).endswith("write the iterations out, or run the case on xnnpack")


def test_a_choice_by_torch_where_is_not_refused() -> None:
    refuse(Plain())
