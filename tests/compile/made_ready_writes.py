"""Compiles programs that write to inputs and buffers, takes them as ready programs, and prints their facts.

The programs are `.pte` files in the current folder and use ExecuTorch's own kernels.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from executorch.exir import to_edge

from farm.builds.compile.flows.compiler import CompiledProgram, Stopwatch, _take_ready
from farm.suites.suite import Case, InputSpec, Job, Target

NETS = """
import torch
class Adds(torch.nn.Module):
    def forward(self, x):
        x += 1.0
        return x * 2.0
class Sums(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 8))
    def forward(self, x):
        self.total.add_(x)
        return self.total * 2.0
class Passes(torch.nn.Module):
    def forward(self, x):
        return x, x.tanh()
class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2.0
"""
TARGET = Target("SM8650", "xnnpack", "fp32")


def compile_nets(folder: Path) -> None:
    (folder / "nets.py").write_text(NETS)
    made: dict[str, Any] = {}
    exec(NETS, made)  # noqa: S102 - the text above
    for name in ("Adds", "Sums", "Passes", "Doubles"):
        exported = torch.export.export(made[name]().eval(), (torch.ones(1, 8),), strict=True)
        (folder / f"{name}.pte").write_bytes(to_edge(exported).to_executorch().buffer)


def taken(folder: Path, pte: str, module: str = "", expected: tuple[tuple[str, ...], ...] = ()) -> dict[str, object]:
    """Return the facts of a ready program that is compared with a module or with files of expected outputs."""
    case = Case(
        "mine", "one", f".nets:{module}" if module else "", (InputSpec((1, 8)),), pte=f"{pte}.pte",
        samples=len(expected) or 2, folder=str(folder),
    )  # fmt: skip
    job = Job(msgspec.structs.replace(case, expected=expected), TARGET)
    samples = [(torch.full((1, 8), float(number + 1)),) for number in range(case.samples)]
    with tempfile.TemporaryDirectory(dir=folder) as into:
        return shown(_take_ready(job, samples, {}, Path(into), Stopwatch()))


def shown(program: CompiledProgram) -> dict[str, object]:
    return {
        "writes": program.writes,
        "lost": program.lost_writes,
        "stateful": program.stateful,
        "outputs": [(spec.name, spec.written) for spec in program.outputs],
        "first": [one.flatten()[0].item() for one in program.references["fp32"][0]],
    }


def expected_file(folder: Path, name: str, value: float) -> str:
    np.save(folder / name, np.full((1, 8), value, "float32"))
    return name


def main(folder: Path) -> dict[str, object]:
    compile_nets(folder)
    of_sums = tuple((expected_file(folder, f"sums_{at}.npy", value),) for at, value in enumerate((2.0, 6.0)))
    of_adds = tuple(expected_file(folder, f"adds_{at}.npy", value) for at, value in enumerate((2.0, 4.0)))
    pairs = (("Adds", "Adds"), ("Sums", "Sums"), ("Doubles", "Adds"), ("Doubles", "Sums"), ("Passes", "Adds"))
    return {
        "compared": {f"{pte} {module}": taken(folder, pte, module) for pte, module in pairs},
        "expected": {
            "Sums": taken(folder, "Sums", expected=of_sums),
            "Adds": taken(folder, "Adds", expected=(of_adds,)),
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path.cwd())))
