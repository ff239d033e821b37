"""A case with an operator of its own, whose package is a stub, all the way: on a virtual device, with the real QNN.

The stub has no kernel. For right outputs, its entry maps the operator to an operator of QNN itself.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

pytestmark = pytest.mark.whole

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
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("packaged"))
    (suite := home.cwd / "packaged").mkdir()
    (suite / "suite.toml").write_text(SUITE)
    (suite / "modules.py").write_text(MODULES)
    return home


@pytest.fixture(scope="module")
def build(home: FarmHome) -> Callable[[str], str]:
    def build(tag: str) -> str:
        library = home.cwd / "packaged" / "package.so"
        macros = ['-DPACKAGE="StubOpPackage"', f'-DTAG="{tag}"']
        subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", *macros, "-o", library, STUB], check=True)
        return hashlib.sha256(library.read_bytes()).hexdigest()

    return build


def run(home: FarmHome, *arguments: str) -> dict[str, Any]:
    """Return the last attempt of each case."""
    asked = ("run", "--soc", "SM8650", "--suite", "./packaged", "--virtual", "1", *arguments)
    jobs = home.json(*asked, timeout_s=900, code=None)["jobs"]
    return {job["case"]: job["attempts"][-1] for job in jobs}


@pytest.fixture(scope="module")
def first(home: FarmHome, build: Callable[[str], str]) -> tuple[str, dict[str, Any]]:
    """The hash of the package, and a run with it."""
    return build("first"), run(home)


def test_an_operator_is_computed_after_its_package_came_with_the_job(
    home: FarmHome, first: tuple[str, dict[str, Any]], build: Callable[[str], str]
) -> None:
    content, jobs = first
    assert (jobs["before"]["verdict"], jobs["mapped"]["verdict"]) == ("passed", "passed"), jobs["mapped"]
    shown = home.farm("show", JOB.format("mapped"))
    # Opened by QNN on the device, under the name that the program has.
    assert f"op_package_stub first: registered from op_packages/x86_64/{content}.so" in shown.stdout
    # Another build of the same package makes another bundle, and the device loads the new package.
    again = build("second")
    assert again != content
    assert run(home, "-k", "mapped")["mapped"]["verdict"] == "passed"
    shown = home.farm("show", JOB.format("mapped"))
    assert f"op_package_stub second: registered from op_packages/x86_64/{again}.so" in shown.stdout


def test_an_operator_that_qnn_refuses_is_not_left_to_the_cpu(home: FarmHome, first: tuple[str, dict[str, Any]]) -> None:
    _, jobs = first
    refused, kernelless = jobs["unregistered"], jobs["kernelless"]
    assert (refused["verdict"], refused["stage"]) == (kernelless["verdict"], kernelless["stage"]) == ("failed", "build")
    assert "case.unregistered.features.op_packages: stub_ops.positive.default of package.so" in refused["reason"]
    # The package was registered and validated, but has no kernel to compute with: it is a stub.
    shown = home.farm("show", JOB.format("kernelless")).stdout
    assert "op_package_stub first: validated from op_packages/x86_64/" in shown
    assert "could not create op: StubOpPackage::StubOp" in shown


@pytest.mark.usefixtures("first")
def test_what_is_taken_elsewhere_has_the_package_and_nothing_else_brings_it(home: FarmHome) -> None:
    home.farm("jobs", "bundle", JOB.format("mapped"), "--to", "elsewhere", code=0)
    folder = home.cwd / "elsewhere"
    [package] = (folder / "op_packages" / "x86_64").iterdir()
    assert package.stem == hashlib.sha256(package.read_bytes()).hexdigest()
    assert "adb push model.pte inputs op_packages *.txt" in (folder / "README.md").read_text()
    home.farm("jobs", "rerun", JOB.format("mapped"), "--script", "again", code=0)
    assert (home.cwd / "again/device/op_packages/x86_64" / package.name).read_bytes() == package.read_bytes()
    alone = home.farm("exec", "elsewhere/model.pte", "--soc", "SM8650", "--backend", "htp", "--virtual", "1", code=2)
    assert f"wants the op package 'op_packages/x86_64/{package.name}'" in alone.stderr
