"""Runs samples of modules with a state, compiles one with a written input, and prints what came of them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from farm.base.errors import ConfigError
from farm.builds.compile.flows.compiler import compile_job
from farm.builds.compile.flows.state import run_samples
from farm.suites.state import State
from farm.suites.suite import Case, InputSpec, Job, Target

SHIFTED = """
import torch
class Sums(torch.nn.Module):
    def forward(self, x, total):
        x += 1.0
        total = total + x
        return total * 2, total
"""
STATE = (State(output=1, input=1),)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = total + x
        return total * 2, total


class Other(torch.nn.Module):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total, x


def case_of(module: str = "", folder: str = "/nowhere", **fields: Any) -> Case:
    return Case("kept", "sums", module, (InputSpec((2,)), InputSpec((2,))), folder=folder, samples=3, **fields)


def ran(state: tuple[State, ...]) -> dict[str, object]:
    """Return the second input and the second output of each sample."""
    found = run_samples(Sums(), case_of(state=state), [(torch.ones(2), torch.zeros(2))] * 3)
    return {
        "inputs": [inputs[1].tolist() for inputs in found.inputs],
        "outputs": [outputs[1].tolist() for outputs in found.outputs],
    }


def refusal(state: State) -> str:
    """Return the message of the ConfigError; empty without one."""
    try:
        run_samples(Other(), case_of(state=(state,)), [(torch.ones(3), torch.zeros(2))] * 2)
    except ConfigError as error:
        return str(error)
    return ""


def compile_shifted(folder: Path) -> None:
    """Compile a module that adds to its input and keeps a state, to `bundle` in a folder."""
    (folder / "shifted.py").write_text(SHIFTED)
    case = case_of(".shifted:Sums", str(folder), state=STATE, precisions=("fp32",))
    (folder / "bundle").mkdir()
    compile_job(Job(case, Target("SM8650", "xnnpack", "fp32")), "0123456789abcdef", {}, folder / "bundle")


if __name__ == "__main__":
    compile_shifted(Path.cwd())
    sys.stdout.write(json.dumps({
        "kept": ran(STATE),
        "plain": ran(()),
        "no output": refusal(State(output=2, input=1)),
        "another shape": refusal(State(output=0, input=0)),
    }))  # fmt: skip
