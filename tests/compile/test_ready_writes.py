"""Writes of a ready `.pte` into inputs and buffers are read from its file, and compared with those of its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executorch.exir import to_edge

from farm.bundles.ready import output_specs, read_ready, ready_manifest
from farm.compile.flows.compiler import CompiledProgram, Stopwatch, _take_ready
from farm.program.pte import Method, read_pte
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of the modules, by ExecuTorch's own kernels."""
    place = tmp_path_factory.mktemp("ready")
    (place / "nets.py").write_text(NETS)
    made: dict[str, Any] = {}
    exec(NETS, made)  # noqa: S102 - the text above
    for name in ("Adds", "Sums", "Passes", "Doubles"):
        exported = torch.export.export(made[name]().eval(), (torch.ones(1, 8),), strict=True)
        (place / f"{name}.pte").write_bytes(to_edge(exported).to_executorch().buffer)
    return place


def method_of(folder: Path, name: str) -> Method:
    return read_pte(folder / f"{name}.pte").method("forward", "")


def taken(folder: Path, into: Path, pte: str, module: str) -> CompiledProgram:
    case = Case("mine", "one", f".nets:{module}" if module else "", (InputSpec((1, 8)),), samples=2, folder=str(folder))
    job = Job(msgspec.structs.replace(case, pte=f"{pte}.pte"), TARGET)
    samples = [(torch.full((1, 8), float(number)),) for number in (1, 2)]
    return _take_ready(job, samples, {}, into, Stopwatch())


@pytest.mark.parametrize(
    ("name", "inputs", "buffers"), [("Adds", (0,), 0), ("Sums", (), 1), ("Passes", (), 0), ("Doubles", (), 0)]
)
def test_the_file_tells_the_writes(folder: Path, name: str, inputs: tuple[int, ...], buffers: int) -> None:
    method = method_of(folder, name)
    assert (method.written_inputs, method.written_buffers) == (inputs, buffers)
    # An input that is passed on is no written input.
    assert [spec.written for spec in output_specs(method)] == [bool(inputs)] + [False] * (len(method.outputs) - 1)


def test_a_ready_program_with_a_state_says_so_without_a_module(folder: Path) -> None:
    for name, stateful, writes in (("Sums", True, ("buffer",)), ("Adds", False, ("input 0",)), ("Doubles", False, ())):
        case = Case("mine", "one", "", (InputSpec((1, 8)),), pte=f"{name}.pte", folder=str(folder))
        method = read_ready(Job(case, TARGET))
        manifest = ready_manifest(
            method, TARGET, folder / f"{name}.pte", key="k", job_id="j", samples=1, inputs=(),
            outputs=output_specs(method), files={},
        )  # fmt: skip
        assert (manifest.stateful, manifest.writes) == (stateful, writes)


def test_a_ready_program_is_compared_with_the_writes_of_its_module(folder: Path, tmp_path: Path) -> None:
    program = taken(folder, tmp_path, "Adds", "Adds")
    assert (program.writes, program.lost_writes) == (("input x",), ())
    assert [(spec.name, spec.written) for spec in program.outputs] == [("x", True), ("", False)]
    assert [one.flatten()[0].item() for one in program.references["fp32"][0]] == [2.0, 4.0]
    assert taken(folder, tmp_path, "Sums", "Sums").stateful


@pytest.mark.parametrize(
    ("pte", "module", "lost"), [("Doubles", "Adds", "input x"), ("Doubles", "Sums", "buffer total")]
)
def test_a_ready_program_without_the_write_fails(
    folder: Path, tmp_path: Path, pte: str, module: str, lost: str
) -> None:
    assert taken(folder, tmp_path, pte, module).lost_writes == (lost,)


def test_a_written_input_is_no_passed_on_input(folder: Path, tmp_path: Path) -> None:
    # Both have two outputs, the written input among those of the module: the file alone shows the difference.
    assert taken(folder, tmp_path, "Passes", "Adds").lost_writes == ("input x",)


def test_expected_files_of_a_stateful_program_are_of_one_execution_each(folder: Path, tmp_path: Path) -> None:
    names = [[f"expected_{sample}.npy"] for sample in (0, 1)]
    for sample, value in enumerate((2.0, 6.0)):
        np.save(folder / names[sample][0], np.full((1, 8), value, "float32"))
    case = Case("mine", "one", "", (InputSpec((1, 8)),), samples=2, folder=str(folder), pte="Sums.pte")
    job = Job(msgspec.structs.replace(case, expected=tuple(map(tuple, names))), TARGET)
    program = _take_ready(job, [(torch.ones(1, 8),), (torch.full((1, 8), 2.0),)], {}, tmp_path, Stopwatch())
    assert (program.stateful, program.writes) == (True, ("buffer",))


def test_an_expected_written_input_is_named(folder: Path, tmp_path: Path) -> None:
    for index, value in enumerate((2.0, 4.0)):
        np.save(folder / f"adds_{index}.npy", np.full((1, 8), value, "float32"))
    case = Case("mine", "one", "", (InputSpec((1, 8)),), samples=1, folder=str(folder), pte="Adds.pte")
    job = Job(msgspec.structs.replace(case, expected=(("adds_0.npy", "adds_1.npy"),)), TARGET)
    program = _take_ready(job, [(torch.ones(1, 8),)], {}, tmp_path, Stopwatch())
    assert [(spec.name, spec.written) for spec in program.outputs] == [("0", True), ("", False)]
