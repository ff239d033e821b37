"""Writes of a ready `.pte` into inputs and buffers are read from its file, and compared with the module's writes."""

from __future__ import annotations

from pathlib import Path

import made
import numpy as np
import pytest
import torch
from executorch.exir import to_edge

from farm.builds.bundles.ready import read_ready, ready_manifest
from farm.builds.compile.flows.compiler import CompiledProgram, Stopwatch, _take_ready
from farm.builds.compile.flows.factory import make_module
from farm.suites.suite import InputSpec, Job

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


def job_of(folder: Path, pte: str, module: str = "", expected: tuple[tuple[str, ...], ...] = ()) -> Job:
    """Return a job with a ready program that is compared with a module or with files of expected outputs."""
    case = {"module": f".nets:{module}" if module else "", "pte": pte and f"{pte}.pte", "expected": expected}
    samples = len(expected) or 2
    return made.job(backend="xnnpack", precision="fp32", inputs=(InputSpec((1, 8)),), samples=samples,
                    folder=str(folder), **case)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of the modules, by ExecuTorch's own kernels."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "nets.py").write_text(NETS)
    for name in ("Adds", "Sums", "Passes", "Doubles"):
        module = make_module(job_of(folder, "", name).case)
        exported = torch.export.export(module.eval(), (torch.ones(1, 8),), strict=True)
        (folder / f"{name}.pte").write_bytes(to_edge(exported).to_executorch().buffer)
    return folder


def take(job: Job, into: Path) -> CompiledProgram:
    samples = [(torch.full((1, 8), float(number + 1)),) for number in range(job.case.samples)]
    return _take_ready(job, samples, {}, into, Stopwatch())


@pytest.mark.parametrize(
    ("name", "writes", "written"),
    [
        ("Adds", ("input 0",), [True, False]),
        ("Sums", ("buffer",), [False]),
        # An input that is passed on is no written input.
        ("Passes", (), [False, False]),
        ("Doubles", (), [False]),
    ],
)
def test_the_file_tells_the_writes_without_a_module(
    folder: Path, name: str, writes: tuple[str, ...], written: list[bool]
) -> None:
    job = job_of(folder, name)
    method = read_ready(job)
    model = folder / f"{name}.pte"
    manifest = ready_manifest(method, job.target, model, key="k", job_id="j", samples=1, inputs=(), files={})
    assert (manifest.stateful, manifest.writes) == (writes == ("buffer",), writes)
    assert [spec.written for spec in manifest.outputs] == written


def test_a_ready_program_is_compared_with_the_writes_of_its_module(folder: Path, tmp_path: Path) -> None:
    program = take(job_of(folder, "Adds", "Adds"), tmp_path)
    assert (program.writes, program.lost_writes) == (("input x",), ())
    assert [(spec.name, spec.written) for spec in program.outputs] == [("x", True), ("", False)]
    assert [one.flatten()[0].item() for one in program.references["fp32"][0]] == [2.0, 4.0]
    assert take(job_of(folder, "Sums", "Sums"), tmp_path).stateful


@pytest.mark.parametrize(
    ("pte", "module", "lost"),
    [
        ("Doubles", "Adds", "input x"),
        ("Doubles", "Sums", "buffer total"),
        # Both have two outputs, and the module counts the written input as one: the file alone shows the difference.
        ("Passes", "Adds", "input x"),
    ],
)
def test_a_ready_program_without_the_write_of_its_module_fails(
    folder: Path, tmp_path: Path, pte: str, module: str, lost: str
) -> None:
    assert take(job_of(folder, pte, module), tmp_path).lost_writes == (lost,)


def test_expected_files_are_of_one_execution_each_and_name_a_written_input(folder: Path, tmp_path: Path) -> None:
    for value in (2.0, 4.0, 6.0):
        np.save(folder / f"{value:.0f}.npy", np.full((1, 8), value, "float32"))
    sums = take(job_of(folder, "Sums", expected=(("2.npy",), ("6.npy",))), tmp_path)
    assert (sums.stateful, sums.writes) == (True, ("buffer",))
    adds = take(job_of(folder, "Adds", expected=(("2.npy", "4.npy"),)), tmp_path)
    assert [(spec.name, spec.written) for spec in adds.outputs] == [("0", True), ("", False)]
