"""Outputs that the exported graph makes constant, from the graph to the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made import job
from made_modules import module_of

from farm.builds.bundles.bundle import Constant, TensorSpec, load_bundle
from farm.builds.compile.flows.compiler import compile_job
from farm.builds.compile.flows.reference import constant_outputs, functional, mark_constants, mark_ready_constants
from farm.suites.suite import InputSpec

LITERAL = "full flag zeros_like buffer moved painted masked empty cut overwritten"
COMPUTED = "computed zero grid zeroed"
LIVE = "live dead times_zero filled input written written_with_input random argmax partly"


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


def export(module: torch.nn.Module) -> torch.export.ExportedProgram:
    return functional(torch.export.export(module.eval(), (torch.randn(1, 4),), strict=True))


def test_outputs_that_depend_on_no_input_are_constant() -> None:
    names, exported = list(Many()(torch.randn(1, 4))), export(Many())
    kinds = ((Constant.LITERAL, LITERAL), (Constant.COMPUTED, COMPUTED), (Constant.NONE, LIVE))
    found = list(constant_outputs(exported))
    assert dict(zip(names, found, strict=True)) == {name: kind for kind, texts in kinds for name in texts.split()}
    # An input that the program writes to comes before its outputs.
    specs = [TensorSpec((1, 4), "float32", written=True), *(TensorSpec((4,), "float32") for _ in names)]
    assert [spec.constant for spec in mark_constants(specs, exported)] == [Constant.NONE, *found]


def two(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, torch.full((2,), 8.0)


def two_without_graph(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x + 1 if x.sum() > 0 else x), torch.full((2,), 8.0)


@pytest.mark.parametrize(
    ("module", "expected"), [(module_of(two), Constant.LITERAL), (module_of(two_without_graph), Constant.NONE)]
)
def test_a_ready_program_is_marked_by_the_graph_of_its_module(module: torch.nn.Module, expected: Constant) -> None:
    specs = [TensorSpec((1, 4), "float32"), TensorSpec((2,), "float32")]
    references = [module(torch.randn(1, 4)) for _ in range(2)]
    marked = mark_ready_constants(specs, references, lambda: export(module))
    assert [spec.constant for spec in marked] == [Constant.NONE, expected]


def test_a_module_is_not_exported_for_outputs_that_can_be_judged() -> None:
    specs = [TensorSpec((1, 4), "float32")]
    outputs = [(torch.randn(1, 4),), (torch.randn(1, 4),)]
    assert mark_ready_constants(specs, outputs, lambda: pytest.fail("it is exported")) == specs


HEAD = """
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


def test_constants_of_the_graph_reach_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(HEAD)
    inputs = (InputSpec((1, 3, 8, 8)),)
    head = job(backend="xnnpack", precision="fp32", module=".net:Head", inputs=inputs, folder=str(tmp_path))
    (tmp_path / "bundle").mkdir()
    compile_job(head, "0123456789abcdef", {}, tmp_path / "bundle")
    outputs = load_bundle(tmp_path / "bundle").manifest.outputs
    constant = {spec.name: spec.constant for spec in outputs if spec.constant is not Constant.NONE}
    assert constant == dict.fromkeys(("stride", "anchors", "flags"), Constant.LITERAL)
