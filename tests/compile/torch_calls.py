"""Calls of a module: a write reaches no other sample, state goes to the next one, and outputs have names."""

from __future__ import annotations

import math
import re
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import made
import numpy as np
import pytest
import torch
from executorch.exir import to_edge
from made import job
from made_modules import buffer_of, module_of

from farm.base.errors import ConfigError
from farm.builds.bundles.bundle import Bundle, Constant, TensorSpec, load_bundle
from farm.builds.bundles.ready import read_ready, ready_manifest
from farm.builds.compile.flows.compiler import CompiledProgram, Stopwatch, _take_ready, compile_job
from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.builds.compile.flows.reference import (
    call,
    constant_outputs,
    flat_outputs,
    functional,
    mark_constants,
    mark_ready_constants,
    output_names,
    run_reference,
    run_samples,
    state_kept,
)
from farm.suites.suite import Case, InputSpec, Job, State, Target

CASE = Case("odd", "one", ".odd:One", (InputSpec((4,)),), folder="/nowhere", samples=3)
X = torch.tensor([1.0, -2.0, 3.0, -4.0])


def in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:2] = 0.0
    return x.relu() + x


def through(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.add_(1.0)


def own_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.c.copy_(x * 2)


def view_of_buffer(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.c[1:3].add_(x[1:3]), x


def replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c = x * 2
    return x


def past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c.data.mul_(2.0)
    return x


def reads_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.c.nan_to_num()


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept += 1
    return x * self.kept


def samples() -> list[tuple[torch.Tensor]]:
    return [(X * factor,) for factor in (1.0, 2.0, 3.0)]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for (a, *_), (b, *_) in zip(one, other, strict=True))


@pytest.mark.parametrize("forward", [in_place, through])
def test_a_write_to_an_input_reaches_no_other_sample_and_no_later_call(forward: Any) -> None:
    given, module = samples(), module_of(forward)
    ran = run_samples(module, CASE, given)
    assert equal(given, samples())
    assert equal(ran.inputs, given)
    assert not any(torch.equal(left, before) for (left,), (before,) in zip(ran.left, given, strict=True))
    assert equal(ran.outputs, run_samples(module, CASE, given).outputs)


@pytest.mark.parametrize("forward", [own_buffer, view_of_buffer])
def test_a_returned_buffer_is_another_output_in_each_sample(forward: Any) -> None:
    ran = run_samples(module_of(forward, c=buffer_of(0.0, 0.0, 0.0, 0.0)), CASE, samples())
    assert len({tuple(output.tolist()) for output, *_ in ran.outputs}) == 3


@pytest.mark.parametrize(
    ("forward", "value", "named"),
    [
        (view_of_buffer, 0.0, ["buffer c"]),
        (in_place, 0.0, ["input x"]),
        (replaces, 1.0, ["buffer c"]),
        (past_its_version, 1.0, ["buffer c"]),
        (reads_buffer, math.nan, []),
    ],
)
def test_writes_to_inputs_and_buffers_are_named_and_the_module_stays_as_it_is(
    forward: Any, value: float, named: list[str]
) -> None:
    module = module_of(forward, c=buffer_of(*[value] * 4))
    found = run_reference(module, CASE, samples(), lambda: module)
    assert list(found.writes.named(found.input_names)) == named
    assert module.c.nan_to_num(9.0).tolist() == [9.0 if math.isnan(value) else value] * 4


@pytest.mark.parametrize(
    ("write", "weight"),
    [
        (lambda weight: weight.mul_(2.0), torch.ones(4)),
        (lambda weight: weight.data.mul_(2.0), torch.ones(4)),
        (lambda weight: weight.data.t()[0].zero_(), torch.ones(2, 3).t()),
    ],
)
def test_a_module_that_writes_to_a_parameter_is_refused(write: Any, weight: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return write(self.weight).sum() * x

    module = module_of(forward, weight=torch.nn.Parameter(weight, requires_grad=False))
    with pytest.raises(ConfigError, match=r"suite.toml: case\.one\.module: forward writes to its parameter weight: "):
        run_reference(module, CASE, samples(), lambda: module)


def test_a_module_that_cannot_be_copied_is_made_again() -> None:
    def made() -> torch.nn.Module:
        return module_of(counts, kept=0, lock=threading.Lock())

    module = made()
    found = run_reference(module, CASE, samples(), made)
    copied = run_reference(module_of(counts, kept=0), CASE, samples(), made)
    assert module.kept == 0
    assert str(found.run.outputs) == str(copied.run.outputs)


def test_an_attribute_that_is_written_stays_as_it_is() -> None:
    module = module_of(counts, kept=0)
    run_reference(module, CASE, samples(), lambda: module)
    assert module.kept == 0


def test_a_graph_begins_again_where_it_began() -> None:
    module = module_of(own_buffer, c=buffer_of(0.0, 0.0, 0.0, 0.0))
    graph = torch.export.export(module, (X,), strict=True).module()
    with state_kept(graph):
        call(graph, (X,))
    assert module.c.tolist() == [0.0] * 4


class Pair(NamedTuple):
    left: torch.Tensor
    right: tuple[torch.Tensor, torch.Tensor]


Scores = namedtuple("Scores", "boxes")


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (X, [""]),
        ((X, X), ["", ""]),
        ({"out": X, "aux": X}, ["out", "aux"]),
        ((X, [X, X]), ["[0]", "[1].0", "[1].1"]),
        ([{"boxes": X}, X], ["[0].boxes", "[1]"]),
        (Pair(X, (X, X)), ["left", "right.0", "right.1"]),
        (Scores(X), ["boxes"]),
        ({"pyramid": {"p3": X, "p4": [X]}}, ["pyramid.p3", "pyramid.p4.0"]),
        # Names are one line, and no name is another output's.
        (
            {"a.b": X, "a": {"b": X}, "two\nlines": X, "[0]": X, "": X, "with blank": [X]},
            ["['a.b']", "a.b", "['two\\nlines']", "['[0]']", "['']", "['with blank'].0"],
        ),
    ],
)
def test_outputs_have_the_paths_of_what_the_module_returns(outputs: Any, names: list[str]) -> None:
    assert list(output_names(outputs)) == names
    assert len(flat_outputs(outputs, CASE)) == len(names)


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        (None, "None, expected tensors alone"),
        ((X, None), r"None in output \[1\], expected"),
        ({"out": X, "count": 3}, "3 in output count, expected"),
        ((X, 0.5), r"0\.5 in output \[1\]"),
        ((X, [X, True]), r"True in output \[1\]\.1"),
        ((X, "label"), r"a str in output \[1\]"),
        ((), "no tensor"),
    ],
)
def test_what_is_no_tensor_is_refused_in_one_line(outputs: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        flat_outputs(outputs, CASE)
    assert re.fullmatch(rf".*suite\.toml: case\.one\.module: forward returns {problem}.*", str(raised.value))


def test_uniform_inputs_fill_the_range_from_low_to_high() -> None:
    uniform = InputSpec((1000,), distribution="uniform", low=2.0, high=6.0)
    (found,) = make_inputs(Case("odd", "one", ".odd:One", (uniform,), folder="/nowhere"), 0)
    assert 2.0 <= found.min() < 2.1
    assert 3.8 < found.mean() < 4.2
    assert 5.9 < found.max() < 6.0


def stateful(state: State | None, module: str = "", folder: str = "/nowhere") -> Case:
    kept = () if state is None else (state,)
    return Case("kept", "sums", module, (InputSpec((4,)),) * 2, folder=folder, samples=3, state=kept)


@pytest.mark.parametrize(("state", "inputs"), [(State(output=1, input=1), [0, 1, 2]), (None, [0, 0, 0])])
def test_each_sample_takes_what_the_one_before_left(state: State | None, inputs: list[int]) -> None:
    def sums(_: Any, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total += x
        return total * 2, total

    ran = run_samples(module_of(sums), stateful(state), [(torch.ones(4), torch.zeros(4))] * 3)
    assert [total[0] for _, total in ran.inputs] == inputs
    assert [total[0] for _, total in ran.outputs] == [one + 1 for one in inputs]


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        (State(output=2, input=1), "names output 2, and there are 2, from 0"),
        (State(output=0, input=0), r"output 0 is float32\[2\], and the input takes float32\[3\]"),
    ],
)
def test_an_output_that_the_input_does_not_take_is_refused(state: State, wrong: str) -> None:
    module = module_of(lambda _, x, total: (total, x))
    with pytest.raises(ConfigError, match=wrong):
        run_samples(module, stateful(state), [(torch.ones(3), torch.zeros(2))] * 2)


def compiled(job: Job, folder: Path) -> Bundle:
    """Compile a job for the CPU into a new folder."""
    folder.mkdir()
    compile_job(job, "0123456789abcdef", {}, folder)
    return load_bundle(folder)


SHIFTED = """
import torch
class Sums(torch.nn.Module):
    def forward(self, x, total):
        x += 1.0
        total = total + x
        return total * 2, total
"""


def test_a_state_beside_a_written_input_has_the_place_of_its_program(tmp_path: Path) -> None:
    # The program gives the written input first: output 1 of the module is its output 2.
    (tmp_path / "shifted.py").write_text(SHIFTED)
    case = stateful(State(output=1, input=1), ".shifted:Sums", str(tmp_path))
    bundle = compiled(Job(case, Target("SM8650", "xnnpack", "fp32")), tmp_path / "bundle")
    assert [(one.output, one.input) for one in bundle.manifest.state] == [(2, 1)]
    outputs = [(spec.name, spec.written) for spec in bundle.manifest.outputs]
    assert outputs == [("x", True), ("", False), ("", False)]
    assert bundle.reference("fp32", 0, 2).tolist() == np.fromfile(bundle.input_files(1)[1], np.float32).tolist()


# Writes of a ready `.pte` into inputs and buffers are read from its file, and compared with the module's writes.


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


# Outputs that the exported graph makes constant, from the graph to the manifest.


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
    outputs = compiled(head, tmp_path / "bundle").manifest.outputs
    constant = {spec.name: spec.constant for spec in outputs if spec.constant is not Constant.NONE}
    assert constant == dict.fromkeys(("stride", "anchors", "flags"), Constant.LITERAL)
