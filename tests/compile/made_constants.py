"""Exports modules with constant outputs, compiles a detector head for the CPU, and prints the constants as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch

from farm.builds.bundles.bundle import TensorSpec
from farm.builds.compile.flows.compiler import compile_job
from farm.builds.compile.flows.constants import constant_outputs, mark_constants, mark_ready_constants
from farm.suites.suite import Case, InputSpec, Job, Limits, Target, Tolerance


class Many(torch.nn.Module):
    """A module with an output of each kind, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchors", torch.tensor([1.0, 2.5, -3.0, 7.0]))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(4))
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.dead = torch.nn.Linear(4, 4)
        torch.nn.init.zeros_(self.dead.weight)

    @torch.no_grad()
    def grid(self) -> torch.Tensor:
        return torch.arange(4.0) + 0.5

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count += 1
        self.last.copy_(x[0])
        painted = torch.zeros(4)
        painted.view(2, 2)[0].fill_(2.0)
        partly = torch.empty(4)
        partly[:2].fill_(2.0)
        filled = torch.zeros(4)
        filled.view(2, 2)[0].copy_(x[0, :2])
        return {
            "full": torch.full((1, 4), 8.0),
            "flag": torch.tensor([True, False]),
            "zeros_like": torch.zeros_like(x).narrow(1, 0, 2),
            "buffer": self.anchors,
            "moved": torch.stack([self.anchors, torch.ones(4)]).reshape(8).to(torch.int64),
            "painted": painted,
            "masked": torch.full((4, 4), -torch.inf).triu(1),
            "empty": x.new_zeros(1, 0),
            "cut": x[:, 4:],
            "overwritten": x.new_empty(1, 4).fill_(3.0),
            "zeroed": torch.empty(4).zero_() + self.anchors,
            "partly": partly,
            "computed": (self.anchors * self.scale).sigmoid(),
            "zero": self.anchors * 0,
            "grid": self.grid(),
            "live": x.relu(),
            "dead": self.dead(x),
            "times_zero": x * 0,
            "filled": filled,
            "input": x,
            "written": self.count,
            "written_with_input": self.last,
            "random": torch.rand(4),
            "argmax": x.argmax(-1),
        }


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.full((2,), 8.0)


class NoGraph(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.sum() > 0:
            x = x + 1
        return x, torch.full((2,), 8.0)


NET = """
import torch
class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.register_buffer("anchors", torch.tensor([1.0, 2.5, -3.0, 7.0]))
    def forward(self, x):
        return {
            "boxes": self.conv(x), "stride": torch.full((1, 4), 8.0), "anchors": self.anchors,
            "flags": torch.tensor([True, False]), "first": x.flatten(1).argmax(-1),
        }
"""


def of_a_graph() -> dict[str, object]:
    """Return the constants of `Many`, and the constants of its specs behind an input that the program writes to."""
    exported = torch.export.export(Many().eval(), (torch.randn(1, 4),), strict=True)
    names = Many()(torch.randn(1, 4))
    constants = constant_outputs(exported)
    specs = [
        TensorSpec((1, 4), "float32", written=True),
        *(TensorSpec((4,), "float32") for _ in Many()(torch.ones(1, 4))),
    ]
    return {
        "constants": dict(zip(names, constants, strict=True)),
        "in order": list(constants),
        "marked": [spec.constant for spec in mark_constants(specs, exported)],
    }


def of_a_ready_program(module: torch.nn.Module) -> list[str]:
    samples = [torch.randn(1, 4) for _ in range(2)]
    specs = [TensorSpec((1, 4), "float32"), TensorSpec((2,), "float32")]
    references = [module(sample) for sample in samples]
    marked = mark_ready_constants(specs, references, lambda: torch.export.export(module, (samples[0],), strict=True))
    return [spec.constant for spec in marked]


def of_outputs_that_can_be_judged() -> dict[str, object]:
    exports = list[int]()

    def export() -> torch.export.ExportedProgram:
        exports.append(1)
        raise AssertionError

    specs = [TensorSpec((1, 4), "float32")]
    marked = mark_ready_constants(specs, [(torch.randn(1, 4),), (torch.randn(1, 4),)], export)
    return {"same": marked == specs, "exports": len(exports)}


def compile_head(folder: Path) -> None:
    """Compile a detector head for the CPU, to `bundle` in a folder, and write its job there."""
    (folder / "net.py").write_text(NET)
    limits = {"fp32": Tolerance(fp32=Limits(sqnr_db=20.0, mismatch=0.5))}
    case = Case(
        "mine", "head", ".net:Head", (InputSpec((1, 3, 8, 8)),), samples=2, folder=str(folder), tolerances=limits
    )
    job = Job(case, Target("SM8650", "xnnpack", "fp32"))
    (folder / "bundle").mkdir()
    compile_job(job, "0123456789abcdef", {}, folder / "bundle")
    (folder / "job.json").write_bytes(msgspec.json.encode(job))


if __name__ == "__main__":
    compile_head(Path.cwd())
    sys.stdout.write(json.dumps({
        "graph": of_a_graph(),
        "ready": {"Two": of_a_ready_program(Two()), "NoGraph": of_a_ready_program(NoGraph())},
        "judged": of_outputs_that_can_be_judged(),
    }))  # fmt: skip
