"""Outputs that the exported graph makes constant."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from farm.bundles.bundle import Bundle, Constant, TensorSpec, load_bundle
from farm.compile.flows.compiler import compile_job
from farm.compile.flows.constants import constant_outputs, mark_constants, mark_ready_constants
from farm.execution.raw import RawResult
from farm.results.attempt import Attempt
from farm.results.judge import judge
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


EXPECTED = {
    Constant.LITERAL: (
        "full", "flag", "zeros_like", "buffer", "moved", "painted", "masked", "empty", "cut", "overwritten",
    ),
    Constant.COMPUTED: ("computed", "zero", "grid", "zeroed"),
    Constant.NONE: (
        "live", "dead", "times_zero", "filled", "input", "written", "written_with_input", "random", "argmax", "partly",
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Bundle]:
    """A detector head, compiled for the CPU, and its bundle as it is read from the disk."""
    folder = tmp_path_factory.mktemp("head")
    (folder / "net.py").write_text(NET)
    limits = {"fp32": Tolerance(fp32=Limits(sqnr_db=20.0, mismatch=0.5))}
    case = Case(
        "mine", "head", ".net:Head", (InputSpec((1, 3, 8, 8)),), samples=2, folder=str(folder), tolerances=limits
    )
    job = Job(case, Target("SM8650", "xnnpack", "fp32"))
    (folder / "bundle").mkdir()
    compile_job(job, "0123456789abcdef", {}, folder / "bundle")
    return job, load_bundle(folder / "bundle")


def judged(compiled: tuple[Job, Bundle], folder: Path, changed: int = -1, element: int = 0, by: float = 0.0) -> Attempt:
    """Return the attempt of an execution that gave the references, but for one element of output `changed`."""
    job, bundle = compiled
    specs = bundle.manifest.outputs
    for sample in range(2):
        for index, spec in enumerate(specs):
            values = bundle.reference("fp32", sample, index).copy()
            if index == changed:
                values.flat[element] = not values.flat[element] if spec.dtype == "bool" else values.flat[element] + by
            values.tofile(folder / f"output_{sample}_{index}.raw")
    outputs = [{"shape": list(spec.shape), "dtype": spec.dtype, "nbytes": spec.nbytes} for spec in specs]
    inferences: list[dict[str, Any]] = [
        {"line": line, "warm_up_ns": [], "iterations_ns": [1000], "differing": {"count": 0, "executions": []}}
        for line in range(2)
    ]
    report = {
        "schema": 1, "ok": True, "exit_code": 0, "error": None, "method": "forward", "verification_ns": 1, "load_ns": 1,
        "inputs": [], "outputs": outputs, "inferences": inferences, "versions": {},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(report))
    raw = RawResult(
        job_id=job.id, serial="stub", workspace=PurePosixPath("/device"), folder=folder, started_ms=1, exit_code=0,
        run_seconds=1.0, push_seconds=0.0, pull_seconds=0.0,
    )  # fmt: skip
    return judge(job, bundle, raw)


def test_constants_of_the_graph_reach_the_judgement(compiled: tuple[Job, Bundle], tmp_path: Path) -> None:
    marks = {spec.name: spec.constant for spec in compiled[1].manifest.outputs}
    literal = dict.fromkeys(("stride", "anchors", "flags"), Constant.LITERAL)
    assert marks == {"boxes": Constant.NONE, "first": Constant.NONE, **literal}
    attempt = judged(compiled, tmp_path)
    assert (attempt.verdict, attempt.reason) == ("passed", "")
    assert "constant by the graph, compared exactly: output stride, output anchors, output flags" in attempt.notes


@pytest.mark.parametrize(("output", "by"), [("stride", 0.001), ("anchors", 0.001), ("flags", 1)])
def test_a_constant_that_the_device_changes_fails_within_its_limits(
    compiled: tuple[Job, Bundle], tmp_path: Path, output: str, by: float
) -> None:
    names = [spec.name for spec in compiled[1].manifest.outputs]
    attempt = judged(compiled, tmp_path, names.index(output), 1, by)
    assert (attempt.verdict, attempt.cause) == ("failed", "numerics")
    assert f"output {output} is constant by the graph" in attempt.reason


def test_a_live_output_may_differ_within_its_limits(compiled: tuple[Job, Bundle], tmp_path: Path) -> None:
    names = [spec.name for spec in compiled[1].manifest.outputs]
    assert judged(compiled, tmp_path, names.index("boxes"), 1, 0.001).verdict == "passed"
