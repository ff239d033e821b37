"""Suites of operators, which cover the op builders of ExecuTorch or declare a reason for a gap, and of models."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.paths import data_folder
from farm.base.socs import find_soc
from farm.report.model.coverage import made_of_others
from farm.suites.manifests import find_suites, load_suite
from farm.suites.op_builders import SuiteOperators, installed_builders, operators_in_tests, suite_operators
from farm.suites.suite import plan

# The operator suites cover the op builders of ExecuTorch's Qualcomm backend, or declare a reason for a gap.


SUITES = ("quantized_ops", "fp_ops")


def said() -> SuiteOperators:
    """Operators that the backend built for each case, and the reasons of builders without a case."""
    return suite_operators(find_suites()["quantized_ops"].parent)


def test_every_builder_of_executorch_has_a_case_or_a_reason() -> None:
    assert len(installed_builders()) >= 100
    built = {target for targets in said().cases.values() for target in targets}
    without = {name for name, targets in installed_builders().items() if built.isdisjoint(targets)}
    missing = sorted(without - set(said().without))
    assert not missing, f"no case of {' and '.join(SUITES)} makes the backend build with {', '.join(missing)}"
    stale = sorted(set(said().without) - without)
    assert not stale, f"operators.json says why these have no case, but they have one, or are gone: {', '.join(stale)}"


def test_the_table_is_of_the_cases_that_there_are() -> None:
    cases = {case.name for suite in SUITES for case in load_suite(find_suites()[suite]).cases}
    assert set(said().cases) == cases == set(said().aten)


def test_operators_that_are_taken_apart_have_a_case_too() -> None:
    having = {name for names in said().aten.values() for name in names}
    apart = {"acosh", "cosh", "reflection_pad3d", "_pdist_forward", "select_scatter", "fill", "as_strided"}
    assert apart <= having & set(operators_in_tests())


def test_every_operator_of_executorchs_tests_has_a_case_or_is_made_of_others_that_have_one() -> None:
    missing = set(operators_in_tests()).difference(*said().aten.values())
    explained = {found.name for found in made_of_others(missing, said().tests, said().aten)}
    assert explained == missing == set(said().tests), (
        f"no case has {', '.join(sorted(missing - explained))}: add one, or run tools/generate_operators.py"
    )


def test_floating_point_runs_what_quantized_runs_or_says_why_not() -> None:
    quantized, floating = ({case.name for case in load_suite(find_suites()[suite]).cases} for suite in SUITES)
    manifest = tomllib.loads(find_suites()["fp_ops"].read_text())
    [include] = manifest["include"]
    assert quantized - floating == set(include["without"])
    assert all(include["without"].values())


def test_the_page_of_the_suites_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/suites.md").read_text(encoding="utf-8")
    table = page.partition("| suite | content |\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(find_suites())


def test_the_kinds_of_tensors_and_precisions_are_represented() -> None:
    suites = [load_suite(find_suites()[suite]) for suite in SUITES]
    jobs = plan(suites, [find_soc("SM8650")], "htp")
    assert 400 <= len(jobs) <= 650
    precisions = {job.target.precision for job in jobs}
    assert precisions == {"8a8w", "8a4w", "16a8w", "16a16w", "16a4w", "16a4w_block", "16a2w", "fp16a8w", "fp16"}
    inputs = [spec for suite in suites for case in suite.cases for spec in case.inputs]
    assert {spec.dtype for spec in inputs} == {"float32", "int32", "int64", "bool"}
    assert {len(spec.shape or ()) for spec in inputs} >= {0, 1, 2, 3, 4, 5}
    assert any(spec.dynamic for spec in inputs)


def test_small_models_are_those_of_full_size() -> None:
    small, full = (
        load_suite(data_folder("test_suites") / name / "suite.toml").cases for name in ("models_small", "models")
    )
    names = [{case.name: case.module.rpartition(".")[2] for case in cases} for cases in (small, full)]
    assert names[0] == names[1]
    assert len(small) >= 12
    for case in (*small, *full):
        assert case.expect, f"{case.name} does not say how much of it is delegated"
        assert all(precision in case.tolerances for precision in case.precisions)


@pytest.mark.parametrize(
    ("soc", "chosen"),
    [
        # Text with state, vision, and speech: every precision and metric of the suite.
        pytest.param("SM8650", ("-k", "16a4w or mobilenet_v3 or vit or wav2vec2 or edsr"), marks=pytest.mark.whole),
        pytest.param("SM8650", (), marks=pytest.mark.soak),
        pytest.param("SM8850", (), marks=pytest.mark.soak),
    ],
)
def test_small_models_pass_on_the_simulator(soc: str, chosen: tuple[str, ...], home: FarmHome) -> None:
    home.farm("run", "--soc", soc, "--suite", "models_small", "--virtual", "1", *chosen, timeout_s=1800, code=0)
