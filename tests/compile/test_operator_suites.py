"""Suites of operators, which cover the op builders of ExecuTorch or declare a reason for a gap, and of models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.errors import ConfigError
from farm.base.paths import data_folder
from farm.base.socs import find_soc
from farm.report.model.coverage import made_of_others
from farm.suites.manifests import find_suites, load_suite
from farm.suites.op_builders import (
    SuiteOperators,
    builders_in,
    installed_builders,
    native_functions,
    operators_in_tests,
    suite_operators,
)
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


# Op builders of ExecuTorch's Qualcomm backend, and their entries in a suite.


def test_the_installed_ones_are_those_that_executorch_registers(
    printed_json: Callable[[Path], dict[str, str]],
) -> None:
    registered = printed_json(Path(__file__).with_name("registered_builders.py"))
    read = {target: f"op_{name}" for name, targets in installed_builders().items() for target in targets}
    assert {target: name for target, name in registered.items() if name.startswith("op_")} == read


def test_the_operators_of_executorchs_tests_are_named_as_aten_names_them() -> None:
    found = operators_in_tests()
    assert {"acosh", "fill", "select_scatter", "_pdist_forward", "conv2d"} <= set(found)
    # Two names of one; a test of something else.
    assert not {"greater", "special_expm1", "fill_", "select_copy", "online_prepare"} & set(found)
    assert 100 < len(found) <= len(native_functions())


def test_the_page_of_the_documentation_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/operators.md").read_text()
    rows = page.partition("## Builders")[2].partition("\n#")[0].splitlines()
    names = [line.split("|")[1].strip() for line in rows if line.startswith("| ")]
    assert names[1:] == list(installed_builders()), f"make it anew: {page.splitlines()[0]}"


def test_a_source_says_what_it_builds_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "op_two.py").write_text(
        'class A:\n    target = ["aten.a.default", "aten.b.default"]\n\n\n'
        'class B(A):\n    target: list[str] = ["aten.b.default"]\n'
        '    other = ["aten.c.default"]\n'
    )
    (tmp_path / "op_none.py").write_text("NAMES = []\n\n\nclass A:\n    target = NAMES\n    size: int\n")
    (tmp_path / "utils.py").write_text('class A:\n    target = ["aten.d.default"]\n')
    assert builders_in(tmp_path) == {"none": (), "two": ("aten.a.default", "aten.b.default")}


def test_what_a_suite_says_is_read_or_refused_by_name(tmp_path: Path) -> None:
    assert suite_operators(tmp_path).cases == {}
    path = tmp_path / "operators.json"
    path.write_text(
        '{"cases": {"relu": ["aten.relu.default"]}, "without": {"op_rand": "no reference", "randn": "same"}}'
    )
    output = suite_operators(tmp_path)
    assert output.cases == {"relu": ("aten.relu.default",)}
    assert output.without == {"rand": "no reference", "randn": "same"}
    for text in ("[]", "{", '{"case": {}}', '{"cases": {"relu": "aten.relu"}}', "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=str(path)):
            suite_operators(tmp_path)
