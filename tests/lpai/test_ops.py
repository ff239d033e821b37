"""The suite `lpai_ops`: the operators with rules in the installed ExecuTorch, and their results over the stub."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from executorch_checkout import installed
from farm_home import FarmHome
from lpai_sdk_stub import StubSdk
from programs import run_program

from farm.suites.manifests import find_suites, load_suite

TOOL = Path(__file__).parents[2] / "tools" / "generate_lpai_ops.py"
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


def ruled_operators() -> set[str]:
    """Return what LPAI's rules are registered for in the installed quantizer, whose import takes torch."""
    rules = ast.parse((installed() / "backends/qualcomm/quantizer/annotators/lpai_rules.py").read_text()).body
    calls = [one for node in rules if isinstance(node, ast.ClassDef) for one in node.decorator_list]
    names = {
        ast.unparse(one)
        for call in calls
        if isinstance(call, ast.Call)
        for one in ast.walk(call.args[0])
        if isinstance(one, ast.Attribute)
    }
    return {name.removeprefix("torch.ops.") for name in names}


def test_the_suite_has_every_case_whose_operators_have_a_rule_and_no_other() -> None:
    suites = find_suites()
    found: dict[str, dict[str, list[str]]] = json.loads((suites["lpai_ops"].parent / "rules.json").read_bytes())
    written = {case.name: case.precisions for case in load_suite(suites["quantized_ops"]).cases}
    assert set(found) == set(written), f"run {TOOL.name}"
    ruled = ruled_operators() | {"<built-in function getitem>"}
    assert len(ruled) > 100
    expected = {
        # Activations of 16 bits do not reach LPAI's delegate whole: docs/reference/backends.md, and the last test.
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
    known = {name.rpartition("/")[2]: one["known_issue"] for name, one in last.items() if one["verdict"] == "failed"}
    assert known.pop("full") == ""
    assert known.keys() == {"index_put_accumulate", "cast_from_bool", "full_like"}
    assert all("LPAI" in issue for issue in known.values())
    assert {name for name, one in last.items() if one["verdict"] == "passed"} == {
        "lpai_ops/full", "lpai_ops/scatter_src",
    }  # fmt: skip
    # QNN would read two codes of 16 bits in place of a code of 32.
    assert last["sixteen/full"]["stage"] == "build"
    assert last["sixteen/full"]["reason"].startswith(
        "MisreadCodesError: activations of 16a8w do not reach the lpai backend with this ExecuTorch: the CPU has them "
        "in int32, and QNN reads and writes uint16: "
    )
