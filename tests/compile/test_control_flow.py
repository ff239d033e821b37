"""Control flow in a module: refused with the function and its line, before anything is quantized or lowered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULES = Path(__file__).with_name("made_control_flow.py")


@pytest.fixture(scope="module")
def refusals(printed_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Output of made_control_flow.py."""
    return printed_json(MODULES)


def line_of(text: str) -> int:
    [line] = [number for number, line in enumerate(MODULES.read_text().splitlines(), 1) if text in line]
    return line


@pytest.mark.parametrize(("module", "place"), [("Branch", ""), ("Inside", "module body, ")])
def test_torch_cond_is_refused_with_its_line(refusals: dict[str, Any], module: str, place: str) -> None:
    line = line_of("torch.cond(")
    output = f"torch.cond ({place}compile/made_control_flow.py:{line}) is control flow, which htp does not take: "
    assert output in refusals[module]
    assert refusals[module].endswith(
        "compute both branches and choose one with torch.where, or run the case on xnnpack"
    )


def test_a_loop_is_refused_with_its_line(refusals: dict[str, Any]) -> None:
    output = f"torch.while_loop (compile/made_control_flow.py:{line_of('torch.while_loop(')})"
    assert output in refusals["Loop"]
    assert refusals["Loop"].endswith("write the iterations out, or run the case on xnnpack")


def test_a_choice_by_torch_where_is_not_refused(refusals: dict[str, Any]) -> None:
    assert refusals["Plain"] == ""
