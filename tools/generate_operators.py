"""Writes test_suites/quantized_ops/operators.json: ExecuTorch's operators that the backend builds for each case.

    farm run --soc SM8650 --suite quantized_ops --suite fp_ops --virtual 2 --json > run.json
    python tools/generate_operators.py run.json           write it
    python tools/generate_operators.py run.json --check   fail when the file is not up to date

ATen's operators are read from each case after torch.export. For an operator in the name of an ExecuTorch test and in
no case, the file has the operators of that test's modules after torch.export: the tests run here, with a recorder in
place of the compiler. Entries of cases outside of the run stay while the suite has them, and so do the reasons for
builders without a case, which are written by hand. The bundles of the run are read from the cache of FARM_CACHE_DIR
or farm.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from upstream_tests import modules_of_tests  # noqa: E402

from farm.base.config.settings import load_config  # noqa: E402
from farm.builds.bundles.cache import BundleCache  # noqa: E402 - also where farm is not installed
from farm.builds.compile.flows.factory import make_inputs, make_module  # noqa: E402
from farm.suites.manifests import find_suites, load_suite  # noqa: E402
from farm.suites.op_builders import native_functions, operators_in_tests, plain_name  # noqa: E402
from farm.suites.suite import Case  # noqa: E402

SUITES = ("quantized_ops", "fp_ops")
TABLE = ROOT / "test_suites" / "quantized_ops" / "operators.json"


def built_by_cases(run: dict[str, Any], bundles: BundleCache) -> dict[str, list[str]]:
    """Return the operators that the backend built for the cases of a run, over all of their precisions and SoCs."""
    found: dict[str, set[str]] = {}
    for job in run["jobs"]:
        operators = found.setdefault(job["case"], set())
        for key in {attempt["bundle_key"] for attempt in job["attempts"]} - {""}:
            if bundle := bundles.lookup(key):
                operators.update(bundle.manifest.operators)
    return {case: sorted(operators) for case, operators in sorted(found.items())}


def suite_cases() -> dict[str, Case]:
    """Return the cases of single operators by name."""
    suites = find_suites()
    return {case.name: case for name in SUITES for case in load_suite(suites[name]).cases}


def aten_of(module: torch.nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """Return the ATen operators of a module, as torch.export has them before and after it takes some apart."""
    with torch.no_grad():
        exported = torch.export.export(module, inputs, strict=True)
        programs = (exported, exported.run_decompositions())
    targets = {str(node.target) for one in programs for node in one.graph.nodes if node.op == "call_function"}
    names = {plain_name(target, native_functions()) for target in targets if target.startswith("aten.")}
    # Operator of torch.nn.ReflectionPad3d, which torch.export decomposes at once.
    padded = [node.args for node in exported.graph.nodes if str(node.target) == "aten.pad.default"]
    names |= {f"reflection_pad{len(args[1]) // 2}d" for args in padded if len(args) > 2 and args[2] == "reflect"}
    return sorted(names - {""})


def of_tests(cases: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the operators of ExecuTorch's tests of each operator that none of the `cases` has."""
    missing = set(operators_in_tests()).difference(*cases.values())
    found = {
        name: {operator for module, inputs in modules for operator in aten_of(module, inputs)}
        for name in missing
        if (modules := modules_of_tests(name))
    }
    return {name: sorted(operators) for name, operators in sorted(found.items())}


def main() -> int | str:
    """Write or check the table; return the exit code or the message of the process."""
    parser = argparse.ArgumentParser(description="Writes test_suites/quantized_ops/operators.json.")
    parser.add_argument("run", type=Path, help="what farm run --json printed")
    parser.add_argument("--check", action="store_true", help="fail when the file is not what would be written")
    options = parser.parse_args()
    written = json.loads(TABLE.read_bytes()) if TABLE.exists() else {"cases": {}, "without": {}}
    known = suite_cases()
    built = built_by_cases(json.loads(options.run.read_bytes()), BundleCache(load_config().cache_dir))
    cases = {case: names for case, names in sorted((written["cases"] | built).items()) if case in known}
    aten = {name: aten_of(make_module(case), make_inputs(case, 0)) for name, case in sorted(known.items())}
    tests = of_tests(aten)
    if options.check:
        is_same = (written["cases"], written.get("aten"), written.get("tests")) == (cases, aten, tests)
        return 0 if is_same else f"{TABLE} is out of date: run this without --check"
    reasons = json.dumps(written["without"], indent=2).replace("\n", "\n  ")
    parts = f'"cases": {_rows(cases)},\n  "aten": {_rows(aten)},\n  "tests": {_rows(tests)},\n  "without": {reasons}'
    TABLE.write_text(f"{{\n  {parts}\n}}\n")
    return 0


def _rows(table: dict[str, list[str]]) -> str:
    rows = ",\n".join(f"    {json.dumps(case)}: {json.dumps(names)}" for case, names in table.items())
    return f"{{\n{rows}\n  }}"


if __name__ == "__main__":
    sys.exit(main())
