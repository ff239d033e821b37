"""The suite `lpai_ops`: the operators with rules in the installed ExecuTorch, and their results over the stub."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from farm_home import FarmHome
from lpai_sdk_stub import StubSdk
from programs import run_program

from farm.suites.manifests import find_suites, load_suite

TOOL = Path(__file__).parents[2] / "tools" / "generate_lpai_ops.py"
QUANTIZER = "backends/qualcomm/quantizer"
SIXTEEN_BITS = """
[suite]
name = "sixteen"
description = "activations of 16 bits on LPAI"
backends = ["lpai"]
precisions = ["16a8w"]
[suite.tolerance.16a8w]
quantized = { sqnr_db = 40.0 }
[case.full]
module = "torch.nn:ReLU"
inputs = [{ shape = [8, 16] }]
"""


def source_of(name: str) -> str:
    """Return the source of a module of the installed quantizer: importing it takes torch."""
    spec = importlib.util.find_spec("executorch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], QUANTIZER, name).read_text()


def rules() -> list[ast.ClassDef]:
    """Return the classes that LPAI's rules are."""
    return [
        node
        for node in ast.parse(source_of("annotators/lpai_rules.py")).body
        if isinstance(node, ast.ClassDef) and node.decorator_list
    ]


def ruled_operators() -> set[str]:
    """Return what LPAI's rules are registered for."""
    calls = [one for node in rules() for one in node.decorator_list if isinstance(one, ast.Call)]
    names = {ast.unparse(one) for call in calls for one in ast.walk(call.args[0]) if isinstance(one, ast.Attribute)}
    return {name.removeprefix("torch.ops.") for name in names}


def test_the_suite_has_every_case_whose_operators_have_a_rule_and_no_other() -> None:
    suites = find_suites()
    found: dict[str, dict[str, list[str]]] = json.loads((suites["lpai_ops"].parent / "rules.json").read_bytes())
    written = {case.name: case.precisions for case in load_suite(suites["quantized_ops"]).cases}
    assert set(found) == set(written), f"run {TOOL.name}"
    ruled = ruled_operators() | {"<built-in function getitem>"}
    assert len(ruled) > 100
    expected = {
        # Activations of 16 bits do not reach LPAI's delegate whole: docs/reference/backends.md, and the next test.
        name: tuple(precision for precision in written[name] if not precision.startswith("16a"))
        for name, one in found.items()
        if ruled.issuperset(one["operators"])
    }
    suite = load_suite(suites["lpai_ops"])
    assert {case.name: case.precisions for case in suite.cases} == {
        name: precisions for name, precisions in expected.items() if precisions
    }, f"run {TOOL.name}"
    assert {precision for case in suite.cases for precision in case.precisions} == {"8a8w", "8a4w", "fp16a8w"}
    # Cases of the suite that `lpai_ops` has replaced.
    assert {"conv2d", "linear", "add", "relu", "max_pool2d"} <= expected.keys()


def test_no_rule_refuses_a_precision_and_sixteen_bits_are_four_bytes_on_the_cpu() -> None:
    # The precisions of LPAI in docs/reference/backends.md match the installed sources, as far as these state them.
    assert [node.name for node in rules() for one in node.body if getattr(one, "name", "") == "validate"] == []
    [constraints] = [
        node
        for node in ast.walk(ast.parse(source_of("backend_opinfo_adapter.py")))
        if isinstance(node, ast.If) and "kLpaiBackend" in ast.unparse(node.test)
    ]
    assert ast.unparse(constraints.body[0]) == "return _NoOpBackendOpInfo()"
    sixteen = [
        {key.arg: ast.unparse(key.value) for key in node.keywords}
        for node in ast.walk(ast.parse(source_of("qconfig.py")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "QuantizationSpec"
    ]
    held_in = {one["dtype"] for one in sixteen if one.get("quant_max") == "torch.iinfo(torch.uint16).max"}
    assert held_in == {"torch.int32"}


def test_a_listing_has_the_known_issues_of_the_suites_backends_alone(home: FarmHome) -> None:
    lines = {line.split()[0]: line for line in home.farm("suites", "lpai_ops").stdout.splitlines() if line}
    # HTP's known issue of the same case is not one here.
    assert lines["cast_to_int32"].endswith("8a8w  (known issue: 8a8w)")
    assert lines["relu"].endswith("8a8w")


# Another ExecuTorch or another case changes them: the first test finds a case without entry.
@pytest.mark.soak
def test_the_operators_of_each_case_are_as_written(home: FarmHome) -> None:
    run_program(
        [sys.executable, str(TOOL), "--check"],
        env={**home.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        timeout_s=900,
    )


@pytest.mark.whole
def test_defects_of_executorch_and_of_the_stub_are_known_and_sixteen_bits_are_refused(
    home: FarmHome, stub_sdk: StubSdk, tmp_path: Path
) -> None:
    sixteen = tmp_path / "sixteen" / "suite.toml"
    sixteen.parent.mkdir()
    sixteen.write_text(SIXTEEN_BITS)
    suites = ("--suite", "lpai_ops", "--suite", str(sixteen.parent))
    devices = ("--soc", "SM8850", "--backend", "lpai", "--virtual", "1")
    # In the numbers by ExecuTorch's program and by the stub, in the build, and as it should be.
    chosen = ("-k", "index_put_accumulate or cast_from_bool or full or scatter_src")
    done = home.farm(
        "run", *suites, *devices, *chosen, "--json", env={"QNN_SDK_ROOT": str(stub_sdk.root)}, timeout_s=400, code=1
    )
    last = {job["id"].partition("[")[0]: job["attempts"][-1] for job in json.loads(done.stdout)["jobs"]}
    known = {name: one["known_issue"] for name, one in last.items() if one["verdict"] == "failed"}
    assert known == {
        "lpai_ops/index_put_accumulate": "LPAI's delegate takes the floats of the first input for codes",
        "lpai_ops/cast_from_bool": (
            "HTP, which computes for LPAI's stub, casts true to the code 1 where nothing follows the cast"
        ),
        "lpai_ops/full_like": "LPAI's delegate has an input for full_like, which reads none",
        "sixteen/full": "",
    }
    assert {name for name, one in last.items() if one["verdict"] == "passed"} == {
        "lpai_ops/full", "lpai_ops/scatter_src",
    }  # fmt: skip
    # QNN would read two codes of 16 bits in place of a code of 32.
    assert last["sixteen/full"]["stage"] == "build"
    assert last["sixteen/full"]["reason"] == (
        "MisreadCodesError: activations of 16a8w do not reach the lpai backend with this ExecuTorch: the CPU has them "
        "in int32, and QNN reads and writes uint16: name a precision with 8-bit activations or another "
        "backend"
    )
