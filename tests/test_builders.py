"""The op builders of ExecuTorch's Qualcomm backend, and their entries in a suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from farm.base.errors import ConfigError
from farm.suites.op_builders import (
    builders_in,
    installed_builders,
    native_functions,
    operators_in_tests,
    suite_operators,
)


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
    page = (Path(__file__).parent.parent / "docs/reference/operators.md").read_text()
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
