"""The suite `lpai_ops`: what the installed ExecuTorch has rules for, and what becomes of it over the stub."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farm.suites.manifests import find_suites, load_suite

if TYPE_CHECKING:
    from farm_home import FarmHome

TOOL = Path(__file__).parents[2] / "tools" / "generate_lpai_ops.py"
RULES = "backends/qualcomm/quantizer/annotators/lpai_rules.py"


def ruled_operators() -> set[str]:
    """Return what LPAI's rules are registered for, read from their source: importing it takes torch."""
    spec = importlib.util.find_spec("executorch")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], RULES).read_text()
    calls = [
        decorator
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    ]
    names = {ast.unparse(one) for call in calls for one in ast.walk(call.args[0]) if isinstance(one, ast.Attribute)}
    return {name.removeprefix("torch.ops.") for name in names}


def test_the_suite_has_every_case_whose_operators_have_a_rule_and_no_other() -> None:
    suites = find_suites()
    operators: dict[str, list[str]] = json.loads((suites["lpai_ops"].parent / "rules.json").read_bytes())
    written = {case.name for case in load_suite(suites["quantized_ops"]).cases if "8a8w" in case.precisions}
    assert set(operators) == written, f"run {TOOL.name}"
    ruled = ruled_operators() | {"<built-in function getitem>"}
    assert len(ruled) > 100
    expected = {name for name, used in operators.items() if ruled.issuperset(used)}
    suite = load_suite(suites["lpai_ops"])
    assert {case.name for case in suite.cases} == expected, f"run {TOOL.name}"
    assert {case.precisions for case in suite.cases} == {("8a8w",)}
    # Of the suite that this one has replaced.
    assert {"conv2d", "linear", "add", "relu", "max_pool2d"} <= expected


def test_the_suite_that_it_replaced_is_refused_with_its_name(home: FarmHome) -> None:
    done = home.farm("run", "--soc", "SM8850", "--backend", "lpai", "--suite", "lpai_smoke", "--virtual", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "farm: unknown suite 'lpai_smoke': did you mean 'lpai_ops'? (it has all of its cases)\n"


@pytest.mark.whole
def test_the_operators_of_each_case_are_as_written(home: FarmHome) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"],
        env={**home.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
