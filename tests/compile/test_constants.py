"""Outputs that the exported graph makes constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farm.bundles.bundle import Constant, TensorSpec
from farm.compile.flows.constants import constant_outputs, mark_constants, mark_ready_constants


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


EXPECTED = {
    Constant.LITERAL: (
        "full", "flag", "zeros_like", "buffer", "moved", "painted", "masked", "empty", "cut",
    ),
    Constant.COMPUTED: ("computed", "zero", "grid"),
    Constant.NONE: (
        "live", "dead", "times_zero", "filled", "input", "written", "written_with_input", "random", "argmax",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Many().eval(), (torch.randn(1, 4),), strict=True)


def test_outputs_that_depend_on_no_input_are_constant(exported: torch.export.ExportedProgram) -> None:
    expected = {name: constant for constant, names in EXPECTED.items() for name in names}
    names = Many()(torch.randn(1, 4))
    assert dict(zip(names, constant_outputs(exported), strict=True)) == {name: expected[name] for name in names}


def test_inputs_that_the_program_writes_to_come_before_its_outputs(exported: torch.export.ExportedProgram) -> None:
    specs = [
        TensorSpec((1, 4), "float32", written=True),
        *(TensorSpec((4,), "float32") for _ in Many()(torch.ones(1, 4))),
    ]
    marked = mark_constants(specs, exported)
    assert [spec.constant for spec in marked[:2]] == [Constant.NONE, Constant.LITERAL]
    assert [spec.constant for spec in marked[1:]] == list(constant_outputs(exported))


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.full((2,), 8.0)


class NoGraph(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.sum() > 0:
            x = x + 1
        return x, torch.full((2,), 8.0)


@pytest.mark.parametrize(("module", "expected"), [(Two(), Constant.LITERAL), (NoGraph(), Constant.NONE)])
def test_a_ready_program_is_marked_by_the_graph_of_its_module(module: Any, expected: Constant) -> None:
    samples = [torch.randn(1, 4) for _ in range(2)]
    specs = [TensorSpec((1, 4), "float32"), TensorSpec((2,), "float32")]
    references = [module(sample) for sample in samples]
    marked = mark_ready_constants(specs, references, lambda: torch.export.export(module, (samples[0],), strict=True))
    assert [spec.constant for spec in marked] == [Constant.NONE, expected]


def test_a_module_is_not_exported_for_outputs_that_can_be_judged() -> None:
    def export() -> torch.export.ExportedProgram:
        raise AssertionError

    specs = [TensorSpec((1, 4), "float32")]
    assert mark_ready_constants(specs, [(torch.randn(1, 4),), (torch.randn(1, 4),)], export) == specs
