"""`tools/upstream_plans.py`: its plans name tests of the installed ExecuTorch, and its table compares counts."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from collections.abc import Callable

import upstream_counts as counts
import upstream_plans as plans


def sources(module: str) -> ast.Module:
    # A search for the parent package only: the test modules themselves import torch.
    spec = importlib.util.find_spec("executorch")
    assert spec is not None
    [folder] = list(spec.submodule_search_locations or [])[:1]
    return ast.parse(Path(folder).joinpath(*module.split(".")[1:]).with_suffix(".py").read_bytes())


def test_every_plan_names_a_test_that_the_installed_executorch_has() -> None:
    parsed = cache(sources)
    for test in (test for plan in plans.PLANS for test in plan.tests):
        module, cls, name = test.split("::")
        [found] = [one for one in parsed(module).body if isinstance(one, ast.ClassDef) and one.name == cls]
        assert name in {one.name for one in found.body if isinstance(one, ast.FunctionDef)}, test
    assert {number for plan in plans.PLANS for number in plan.change.split("/")} >= {"18151", "16316", "19716"}
    assert {change.split("/")[0] for change, _, _ in plans.NOT_TRIED} == {"18151", "19673", "16316", "19716"}


def rows(*, verdict: str = "passed", **count: Any) -> list[Any]:
    plan = plans.PLANS[0]
    [test] = plan.tests
    name = test.partition("::")[2]
    attempt = {"verdict": verdict, "known_issue": "", "reason": "1 != 2" if verdict == "failed" else ""}
    run = {"jobs": [{"id": f"pytest/test_qnn_delegate.py::{name}[SM8850-lpai]", "attempts": [attempt]}]}
    counted = {"test": name, "line": 7, "what": "partitions", "upstream": 8, "ours": 8, "checked": True, **count}
    found: list[Any] = plans.rows_of((plan,), run, [counted] if counted["what"] else [])
    return found


@pytest.mark.parametrize(
    ("given", "holds", "shown"),
    [
        ({}, True, "| partitions | 8 | 8 | passed | ✓ |"),
        ({"ours": 7}, False, "| partitions | 8 | 7 | passed | ✗ |"),
        ({"ours": None}, False, "| partitions | 8 | - | passed | ✗ |"),
        ({"ours": 7, "checked": False}, True, "| partitions | 8 | 7 | passed | not checked upstream |"),
        ({"verdict": "failed"}, False, "| partitions | 8 | 8 | failed: 1 != 2 | ✗ |"),
        ({"verdict": "skipped"}, False, "| partitions | 8 | 8 | skipped | ✗ |"),
        ({"what": ""}, False, "| - | - | - | passed | ✗ |"),
    ],
)
def test_a_row_holds_where_a_test_passed_with_upstreams_count(given: dict[str, Any], holds: bool, shown: str) -> None:
    [row] = rows(**given)
    assert row.holds is holds
    text = plans.markdown([row])
    assert shown in text
    assert (
        "| #18151 | stub of LPAI | TestQNNQuantizedOperator::test_qnn_backend_mean (executorch/backends/qualcomm/"
        in text
    )
    assert "| #19673 | `extension/module/test/module_test.cpp`, C++ | no wheel has it |" in text


def test_a_test_that_did_not_run_is_a_row() -> None:
    [row] = plans.rows_of((plans.PLANS[0],), {"jobs": []}, [])
    assert (row.outcome, row.holds) == ("not run", False)


def raising(**_: Any) -> None:
    raise RuntimeError


@pytest.mark.parametrize(("before", "after"), [(raising, None), (None, raising)])
def test_a_watch_that_fails_leaves_the_test_alone(before: Callable[..., None], after: Callable[..., None]) -> None:
    call = counts._watched(lambda first, second=2: first + second, before or counts._nothing, after or counts._nothing)
    assert (call(1), call(1, second=5)) == (3, 6)


def test_an_expectation_is_read_as_the_call_has_it(tmp_path: Path) -> None:
    kept = counts.Counts(tmp_path / "counts.jsonl")

    def lower(self: object, module: str, expected_partitions: int = 1) -> tuple[object, str, int]:
        return self, module, expected_partitions

    watch = counts._watched(
        lower,
        lambda *, expected_partitions=1, **_: kept.expect("partitions", expected_partitions),
        counts._nothing,
    )
    watch(None, "module")
    watch(None, "module", expected_partitions=3)
    assert kept._golden == {"partitions": 4}
