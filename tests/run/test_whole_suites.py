"""Suites of difficult modules, features and operator packages on the HTP simulator, from the module to the verdict."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from warm_torch import run_script

# The suite of difficult modules on the HTP simulator and on XNNPACK: each job passes or is refused in one line.


pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[2]
AWKWARD = ROOT / "test_suites" / "awkward" / "suite.toml"
CONSTANT = ("constant_beside", "empty")
"""Cases with outputs that only the graph marks as constant: files with expected values carry no mark."""
WRITES = ("input_slice", "input_add", "input_returned", "input_through_view")
_INPUT = r"(the program does not write|forward writes) to its input "
REFUSALS = {
    **dict.fromkeys((*WRITES, "second_input"), _INPUT),
    "buffer_sum": "output 0 against fp32: sqnr -",
    "buffer_returned": "forward writes to its buffer last, and the htp flow cannot compile it",
    "buffer_replaced": "the program does not write to its buffer last",
    "intermediate": "output 1 against fp32: sqnr ",
    "parameter_write": "forward writes to its parameter weight: a program has no such write",
    "with_none": r"forward returns None in output \[1\]",
    "with_number": r"forward returns 8 in output \[1\]",
    "constant_beside": "disagree on the delegate signature",
    "channels_last": "XNNPACK takes weights of convolutions in C order",
    "undefined": "sqrt is nan|the fp32 reference of output 0 has NaN",
}
"""Text in the reason of each case that does not pass everywhere: a known issue covers any failure at its stage."""


def run_awkward(home: FarmHome, suite: str, backend: str, *more: str) -> list[dict[str, Any]]:
    """Return the jobs of a run, which may fail."""
    asked = ("run", "--soc", "SM8650", "--suite", suite, "--virtual", "1", "--backend", backend, *more)
    jobs: list[dict[str, Any]] = home.json(*asked, timeout_s=500, code=None)["jobs"]
    return jobs


@pytest.fixture(scope="module")
def shared_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def jobs(shared_home: FarmHome) -> list[dict[str, Any]]:
    return [job for backend in ("htp", "xnnpack") for job in run_awkward(shared_home, "awkward", backend)]


def test_each_job_passes_or_is_refused_in_one_line(jobs: list[dict[str, Any]]) -> None:
    assert len(jobs) == 96
    for job in jobs:
        attempt = job["attempts"][-1]
        assert "\n" not in attempt["reason"]
        if attempt["verdict"] != "passed":
            assert attempt["known_issue"], attempt["reason"]
            assert re.search(REFUSALS[job["case"]], attempt["reason"]), (job["id"], attempt["reason"])


def test_passed_programs_compute_the_module_on_unseen_inputs(
    shared_home: FarmHome, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    passed = [job for job in jobs if job["attempts"][-1]["verdict"] == "passed" and job["case"] not in CONSTANT]
    asked = [
        {"key": job["attempts"][-1]["bundle_key"]} | {name: job[name] for name in ("case", "precision", "backend")}
        for job in passed
    ]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("unseen_inputs.py")
    run_script(script, str(AWKWARD), str(shared_home.cache), str(tmp_path), cache=shared_home.cache, folder=tmp_path)
    again = {
        (backend, job["case"]): job["attempts"][-1]
        for backend in ("htp", "xnnpack")
        for job in run_awkward(shared_home, str(tmp_path / backend), backend, "--iterations", "1", "--warm-up", "0")
    }
    expected = {(one["backend"], f"{one['case']}_{one['precision']}") for one in asked}
    assert {key: attempt["reason"] for key, attempt in again.items()} == dict.fromkeys(expected, "")


# Suite of the backend's features on the simulator: executable cases pass, all others are compiled and skipped.


MAIN = ("run", "--soc", "SM8650", "--suite", "features", "--virtual", "1")
# Quickest case of each kind.
CHEAP = (
    "methods_part or weight_sharing or online_prepare or shared_buffer or state_cell or tensor_dump or saver "
    "or skip_node"
)


@pytest.fixture(scope="module")
def ran(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("features"))
    return {job["case"]: job["attempts"][-1] for job in home.json(*MAIN, "-k", CHEAP, timeout_s=500)["jobs"]}


def test_what_the_simulator_has_passes(ran: dict[str, Any]) -> None:
    executed = ("methods_part", "shared_buffer", "state_cell", "tensor_dump", "saver", "skip_node")
    assert {case: ran[case]["verdict"] for case in executed} == dict.fromkeys(executed, "passed")


def test_what_only_devices_have_is_compiled_and_skipped(ran: dict[str, Any]) -> None:
    for case, why in (
        ("weight_sharing", "contexts that share weights are not simulated"),
        ("online_prepare", "its graph is made by the device"),
    ):
        assert (ran[case]["verdict"], ran[case]["stage"]) == ("skipped", "build")
        assert why in ran[case]["reason"]
        assert ran[case]["bundle_key"]


# Code that gives other outputs for the same inputs, from the compiler to the verdict, on the real runner.


NETS = """
import torch
class Noise(torch.nn.Module):
    # So little that every execution is within the limits.
    def forward(self, x):
        return x + torch.rand(8) * 1e-3
class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
    def forward(self, x):
        self.total.add_(x)
        return self.total + 0
class Last(torch.nn.Module):
    # Written as a whole before it is read.
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8))
    def forward(self, x):
        self.last.copy_(x)
        return self.last * 2
"""

REPEATED_SUITE = """
[suite]
name = "mine"
description = "cases that repeat themselves, and cases that do not"
tolerance.fp32.fp32.cosine = 0.99

[case]
steady = { module = "torch.nn:ReLU", inputs = [{ shape = [8] }] }
noise = { module = ".nets:Noise", inputs = [{ shape = [8] }] }
noise_on_purpose = { module = ".nets:Noise", inputs = [{ shape = [8] }], deterministic = false }
counter = { module = ".nets:Counter", inputs = [{ shape = [8] }] }
counter_that_must_not = { module = ".nets:Counter", inputs = [{ shape = [8] }], deterministic = true }
last = { module = ".nets:Last", inputs = [{ shape = [8] }], deterministic = true }
"""
GOES_ON = "writes to its buffer total: each sample is executed once, as its state goes on"


def test_outputs_that_differ_between_executions_fail_unless_the_case_says_so(home: FarmHome) -> None:
    """On the CPU, as that compiles fastest."""
    mine = home.cwd / "mine"
    mine.mkdir()
    (mine / "suite.toml").write_text(REPEATED_SUITE)
    (mine / "nets.py").write_text(NETS)
    asked = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--suite", "./mine", "--virtual", "1")
    done = home.json(*asked, "--iterations", "3", timeout_s=600, code=1)
    attempts = {job["case"]: job["attempts"][-1] for job in done["jobs"]}
    for case in ("noise", "counter_that_must_not"):
        attempt = attempts.pop(case)
        assert (attempt["verdict"], attempt["stage"], attempt["cause"]) == ("failed", "numerics", "numerics"), attempt
        assert attempt["reason"] == "executions 1, 2, 3 of 4 (the first is warm-up) gave other outputs than the last"
        # Each execution is within the limits.
        assert [one["violations"] for one in attempt["comparisons"]] == [[]]
    assert {attempt["verdict"] for attempt in attempts.values()} == {"passed"}, attempts
    why = "gave other outputs than the last: the case is declared as not deterministic"
    assert any(note.endswith(why) for note in attempts.pop("noise_on_purpose")["notes"])
    notes = {case: attempt["notes"] for case, attempt in attempts.items()}
    assert notes == {"steady": [], "last": ["writes to its buffer last"], "counter": [GOES_ON]}


# A case with an operator of its own, whose package is a stub, all the way: on a virtual device, with the real QNN.
#
# The stub has no kernel. For right outputs, its entry maps the operator to an operator of QNN itself.


STUB = Path(__file__).parents[1] / "op_package_stub.cpp"
MODULES = """
from torch import nn, ops
from torch.library import Library, impl

LIBRARY = Library("stub_ops", "DEF")
LIBRARY.define("positive(Tensor input) -> Tensor")
LIBRARY.define("positive.out(Tensor input, *, Tensor(a!) output) -> Tensor(a!)")


@impl(LIBRARY, "positive", dispatch_key="CompositeExplicitAutograd")
def positive(input):
    return input.clamp(min=0)


@impl(LIBRARY, "positive.out", dispatch_key="CompositeExplicitAutograd")
def positive_out(input, *, output):
    return output.copy_(input.clamp(min=0))


class Positive(nn.Module):
    def forward(self, x):
        return ops.stub_ops.positive.default(x) + 1
"""
CASE = """
[case.{case}]
module = ".modules:Positive"
inputs = [{{ shape = [1, 2, 3, 4] }}]

[[case.{case}.features.op_packages]]
name = "{name}"
operator = "stub_ops.positive.default"
qnn_operator = "{qnn_operator}"
interface_provider = "{provider}"
library = "package.so"
"""
SUITE = """
[suite]
name = "packaged"
description = "An operator of its own, in a stub of a package"
precisions = ["8a8w"]
tolerance.8a8w = { fp32.sqnr_db = 30.0, quantized.steps = 1.5 }

# First, so that a process of the runner, and one of the compiler, has QNN up without any package.
[case.before]
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 2, 3, 4] }]
""" + "".join(
    CASE.format(case=case, name=name, qnn_operator=operator, provider=provider)
    for case, name, operator, provider in (
        ("mapped", "qti.aisw", "Relu", "StubInterfaceProvider"),
        ("kernelless", "StubOpPackage", "StubOp", "StubInterfaceProvider"),
        ("unregistered", "StubOpPackage", "StubOp", "NoSuchProvider"),
    )
)
JOB = "packaged/{}[SM8650-htp-8a8w]"


@pytest.fixture(scope="module")
def packaged_home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    packaged_home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("packaged"))
    (suite := packaged_home.cwd / "packaged").mkdir()
    (suite / "suite.toml").write_text(SUITE)
    (suite / "modules.py").write_text(MODULES)
    return packaged_home


@pytest.fixture(scope="module")
def build(packaged_home: FarmHome) -> Callable[[str], str]:
    def build(tag: str) -> str:
        library = packaged_home.cwd / "packaged" / "package.so"
        macros = ['-DPACKAGE="StubOpPackage"', f'-DTAG="{tag}"']
        subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", *macros, "-o", library, STUB], check=True)
        return hashlib.sha256(library.read_bytes()).hexdigest()

    return build


def run(packaged_home: FarmHome, *arguments: str) -> dict[str, Any]:
    """Return the last attempt of each case."""
    asked = ("run", "--soc", "SM8650", "--suite", "./packaged", "--virtual", "1", *arguments)
    jobs = packaged_home.json(*asked, timeout_s=900, code=None)["jobs"]
    return {job["case"]: job["attempts"][-1] for job in jobs}


@pytest.fixture(scope="module")
def first(packaged_home: FarmHome, build: Callable[[str], str]) -> tuple[str, dict[str, Any]]:
    """The hash of the package, and a run with it."""
    return build("first"), run(packaged_home)


def test_an_operator_is_computed_after_its_package_came_with_the_job(
    packaged_home: FarmHome, first: tuple[str, dict[str, Any]], build: Callable[[str], str]
) -> None:
    content, jobs = first
    assert (jobs["before"]["verdict"], jobs["mapped"]["verdict"]) == ("passed", "passed"), jobs["mapped"]
    shown = packaged_home.farm("show", JOB.format("mapped"))
    # Opened by QNN on the device, under the name that the program has.
    assert f"op_package_stub first: registered from op_packages/x86_64/{content}.so" in shown.stdout
    # Another build of the same package makes another bundle, and the device loads the new package.
    again = build("second")
    assert again != content
    assert run(packaged_home, "-k", "mapped")["mapped"]["verdict"] == "passed"
    shown = packaged_home.farm("show", JOB.format("mapped"))
    assert f"op_package_stub second: registered from op_packages/x86_64/{again}.so" in shown.stdout


def test_an_operator_that_qnn_refuses_is_not_left_to_the_cpu(
    packaged_home: FarmHome, first: tuple[str, dict[str, Any]]
) -> None:
    _, jobs = first
    refused, kernelless = jobs["unregistered"], jobs["kernelless"]
    assert (refused["verdict"], refused["stage"]) == (kernelless["verdict"], kernelless["stage"]) == ("failed", "build")
    assert "case.unregistered.features.op_packages: stub_ops.positive.default of package.so" in refused["reason"]
    # The package was registered and validated, but has no kernel to compute with: it is a stub.
    shown = packaged_home.farm("show", JOB.format("kernelless")).stdout
    assert "op_package_stub first: validated from op_packages/x86_64/" in shown
    assert "could not create op: StubOpPackage::StubOp" in shown


@pytest.mark.usefixtures("first")
def test_what_is_taken_elsewhere_has_the_package_and_nothing_else_brings_it(packaged_home: FarmHome) -> None:
    packaged_home.farm("jobs", "bundle", JOB.format("mapped"), "--to", "elsewhere", code=0)
    folder = packaged_home.cwd / "elsewhere"
    [package] = (folder / "op_packages" / "x86_64").iterdir()
    assert package.stem == hashlib.sha256(package.read_bytes()).hexdigest()
    assert "adb push model.pte inputs op_packages *.txt" in (folder / "README.md").read_text()
    alone = packaged_home.farm(
        "exec", "elsewhere/model.pte", "--soc", "SM8650", "--backend", "htp", "--virtual", "1", code=2
    )
    assert f"wants the op package 'op_packages/x86_64/{package.name}'" in alone.stderr
